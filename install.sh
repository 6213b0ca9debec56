#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Puts semishared into an OpenNebula front-end, and takes it out again: --help. The work is done in lib/semishared/install.
set -eu

python=/usr/bin/python3
# Not by cd: CDPATH may lead elsewhere. And who calls it through a link means the checkout, not the place of the link.
here=$(readlink -f -- "$0")
main=${here%/*}/lib/semishared/install/main.py

die() {
    printf 'install.sh: %s\n' "$1" >&2
    exit 1
}

is_new() { "$1" -IS -c 'import sys; sys.exit(sys.version_info < (3, 9))'; }

[ -x "$python" ] || die "$python is missing: install python3 (3.9 or newer)"
if ! is_new "$python"; then
    # As the drivers do: lib/semishared/newer_python.py.
    for newer in "$python".9 "$python".[1-9][0-9]; do
        [ -x "$newer" ] && is_new "$newer" && found=$newer
    done
    python=${found-}
    [ "$python" ] || die "/usr/bin/python3 is older than 3.9: install a newer one beside it (docs/reference/platforms.md)"
fi
[ -f "$main" ] || die "$main is missing: call it in a whole checkout"
# No byte code into the checkout, which may be somebody else's.
exec "$python" -IS -B "$main" "$@"
