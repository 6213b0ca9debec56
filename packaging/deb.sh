#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Build the packages of Debian from the archive of `make dist`, into build/deb; the same bytes for the same commit and the same tools.
# Their version is that of lib/semishared/__init__.py, their time that of the commit.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

archive=$(packaging/dist.sh)
version=$(basename "$archive" .tar.xz)
version=${version#semishared-}
work=build/deb/work
rm -rf build/deb
mkdir -p "$work"
tar --extract --file="$archive" --directory="$work" --no-same-owner
cd "$work/semishared-$version"
cp -R packaging/debian debian
# The archive's times are the commit's.
SOURCE_DATE_EPOCH=$(stat -c %Y COMMIT)
export SOURCE_DATE_EPOCH
# 0.3.0.dev1 comes before 0.3.0.
cat >debian/changelog <<EOF
semishared (${version/.dev/~dev}) unstable; urgency=medium

  * CHANGELOG.md says what changed.

 -- $(sed -n 's/^Maintainer: //p' debian/control)  $(date -R -u -d "@$SOURCE_DATE_EPOCH")
EOF
DEB_BUILD_OPTIONS=nocheck dpkg-buildpackage --build=binary --unsigned-changes --unsigned-source >../log 2>&1 || {
    tail -n 20 ../log >&2
    exit 1
}
cd ../../../..
mv "$work"/*.deb build/deb/
(cd build/deb && sha256sum ./*.deb | sed 's| \./| |' >SHA256SUMS)
mv "$work"/*.changes "$work"/*.buildinfo "$work/log" build/deb/
rm -rf "$work"
ls build/deb/*.deb
