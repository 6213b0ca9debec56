#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Build the packages of RPM from the archive of `make dist`, into build/rpm; by any rpmbuild, also Debian's.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

archive=$(packaging/dist.sh)
version=$(basename "$archive" .tar.xz)
version=${version#semishared-}
work=$PWD/build/rpm/work
rm -rf build/rpm
mkdir -p "$work/SOURCES"
cp "$archive" "$work/SOURCES/"
tar --extract --file="$archive" --directory="$work" --no-same-owner --strip-components=3 "semishared-$version/packaging/rpm"
# The time of the commit, as of all files in the archive.
SOURCE_DATE_EPOCH=$(stat -c %Y "$work/semishared.spec")
export SOURCE_DATE_EPOCH
rpmbuild -bb --define "_topdir $work" --define "semishared_source $version" \
    --define "semishared_version ${version/.dev/~dev}" --define "_buildhost localhost" \
    --define "use_source_date_epoch_as_buildtime 1" --define "clamp_mtime_to_source_date_epoch 1" \
    "$work/semishared.spec" >"$work/log" 2>&1 || {
    tail -n 20 "$work/log" >&2
    exit 1
}
mv "$work"/RPMS/noarch/*.rpm "$work/log" build/rpm/
rm -rf "$work"
(cd build/rpm && sha256sum ./*.rpm | sed 's| \./| |' >SHA256SUMS)
ls build/rpm/*.rpm
