#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Run a command in a copy of a Debian release's root (lab/roots.py; 12 is this machine's own): an overlay, so that the root itself stays
# as it is. What is written lies in UPPER, and is there for the next command. /packages there is this checkout's build.
#
#   tests/packages/root.sh RELEASE UPPER COMMAND...      in that root
#   tests/packages/root.sh --beside RELEASE UPPER COMMAND...      outside, with the root mounted at $NEW
set -euo pipefail

roots=${SEMISHARED_LAB_ROOTS:-$PWD/build/roots}
if [ -z "${INSIDE_ROOT-}" ]; then
    INSIDE_ROOT=1 exec unshare --mount --propagation private --fork --kill-child "$0" "$@"
fi
unset INSIDE_ROOT
beside=
if [ "$1" = --beside ]; then
    beside=yes
    shift
fi
lower=/
[ "$1" = 12 ] || lower=$roots/$1
upper=$2
shift 2
mkdir -p "$upper/new" "$upper/changed" "$upper/work"
new=$upper/new
mount -t overlay overlay -o "lowerdir=$(readlink -f "$lower"),upperdir=$upper/changed,workdir=$upper/work" "$new"
for name in proc dev; do mount --rbind "/$name" "$new/$name"; done
mount -t tmpfs -o mode=1777 tmp "$new/tmp"
mount -t tmpfs -o mode=755 run "$new/run"
mkdir -p "$new/packages"
mount --bind "$PWD/build" "$new/packages"
export NEW=$new PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
[ -z "$beside" ] || exec "$@"
exec chroot "$new" "$@"
