#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Stand-in: `--nodecomp URL TARGET` writes a file of the rsync repository, or of another machine, to TARGET (-: stdout).
set -eu
[ "$1" = --nodecomp ]
[ "$3" = - ] || exec >"$3"
case $2 in
ssh://*)
    place=${2#ssh://}
    exec ssh "${place%%:*}" "cat '${place#*:}'"
    ;;
*) exec cat "/${2#rsync://*//*/}" ;;
esac
