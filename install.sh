#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Puts semishared into an OpenNebula front-end, and takes it out again: --help. The work is done in lib/semishared/install.
set -eu

python=/usr/bin/python3
here=$(cd -- "$(dirname -- "$0")" && pwd)

die() {
    printf 'install.sh: %s\n' "$1" >&2
    exit 1
}

[ -x "$python" ] || die "$python is missing: install python3 (3.9 or newer)"
"$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 9))' ||
    die "$python is older than 3.9: install a newer python3"
# No byte code into the checkout, which may be somebody else's.
exec "$python" -I -B "$here/lib/semishared/install/main.py" "$@"
