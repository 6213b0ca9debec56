#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Stand-in: `--nodecomp URL -` writes a file of the rsync repository to stdout.
set -eu
[ "$1" = --nodecomp ] && [ "$3" = - ]
exec cat "/${2#rsync://*//*/}"
