#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Run a command with the programs of another Debian release (roots.py): its /usr and /etc in a mount namespace of its own,
# where this checkout and /tmp are what they are outside. PYTHONPATH has pytest for the release's Python, then what it had.
#
#   tests/lab/in_root.sh RELEASE COMMAND...      from the top of the checkout, as root
set -euo pipefail

roots=${SEMISHARED_LAB_ROOTS:-$PWD/build/roots}
if [ -z "${INSIDE_ROOT-}" ]; then
    [ -e "$roots/$1.tests" ] || { echo "in_root: run make platform-root RELEASE=$1" >&2 && exit 1; }
    INSIDE_ROOT=1 exec unshare --mount --propagation private "$0" "$@"
fi
root=$roots/$1
tests=$roots/$1.tests
new=$(mktemp -d)
mount -t tmpfs -o mode=755,size=64m root "$new"
mkdir "$new"/{usr,etc,proc,sys,dev,tmp,.old}
for name in usr etc; do mount --rbind "$root/$name" "$new/$name"; done
for name in bin sbin lib lib32 lib64 libx32; do
    [ ! -L "$root/$name" ] || cp -P "$root/$name" "$new/$name"
done
for name in proc sys dev tmp; do mount --rbind "/$name" "$new/$name"; done
for name in "$PWD" "$tests"; do
    mkdir -p "$new$name"
    mount --bind "$name" "$new$name"
done
here=$PWD
cd "$new"
pivot_root . .old
umount -l /.old
cd "$here"
export PATH=/usr/sbin:/usr/bin PYTHONPATH=$tests:${PYTHONPATH-} PYTHONDONTWRITEBYTECODE=1
shift
exec "$@"
