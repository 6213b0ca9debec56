#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Stand-in: `--nodecomp URL TARGET` writes a disk of a backup, or a file of another machine, to TARGET (-: stdout).
set -eu
[ "$1" = --nodecomp ]
[ "$3" = - ] || exec >"$3"
case $2 in
ssh://*)
    place=${2#ssh://}
    exec ssh "${place%%:*}" "cat '${place#*:}'"
    ;;
*) exec "${0%/*}/chain_downloader" "$2" ;;
esac
