#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Write the source archive of this checkout's commit into build/dist, with SHA256SUMS. The same commit gives the same bytes on
# any machine with the same git and xz: git takes order, modes and times from the commit, and puts the commit itself into the file COMMIT.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

die() {
    printf 'dist: %s\n' "$*" >&2
    exit 1
}

# A checkout may be another user's than root's, who builds.
git() { command git --no-optional-locks -c safe.directory='*' -c tar.umask=0022 "$@"; }

[ "$(git rev-parse --show-toplevel 2>/dev/null)" = "$PWD" ] || die "this is no checkout of git: an archive is already what it makes"
version=$(git show HEAD:lib/semishared/__init__.py | sed -n 's/^VERSION = "\([^"]*\)"$/\1/p')
[ -n "$version" ] || die "lib/semishared/__init__.py has no VERSION"
[ -z "$(git status --porcelain)" ] || printf 'dist: what is not committed is not in it\n' >&2

name=semishared-$version
mkdir -p build/dist
new=$(mktemp -d build/dist/.new.XXXXXX)
trap 'rm -rf "$new"' EXIT
# One thread: with several, xz cuts the archive into blocks by their number.
git archive --format=tar --prefix="$name/" HEAD | xz --threads=1 -2 >"$new/$name.tar.xz"
(cd "$new" && sha256sum "$name.tar.xz" >SHA256SUMS)
chmod 644 "$new"/*
mv "$new/$name.tar.xz" "$new/SHA256SUMS" build/dist/
echo "build/dist/$name.tar.xz"
