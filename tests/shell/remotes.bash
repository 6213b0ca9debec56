# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# An OpenNebula front-end in a directory, to install into, and what stands for its own scripts.

front_end() { # front_end DIRECTORY: one as its packages lay it out
    mkdir -p "$1/var/lib/one" "$1/etc/one/vmm_exec"
    cp -r "$CHECKOUT/tests/lab/stock" "$1/var/lib/one/remotes"
    mkdir -p "$1/var/lib/one/remotes/tm/ssh"
    # Python knows how those two files look: tests/configurations.py.
    PYTHONPATH=$CHECKOUT/tests /usr/bin/python3 - "$1/etc/one" <<'PYTHON'
import sys
from configurations import oned_conf, vmm_execrc
for name, text in (("oned.conf", oned_conf()), ("vmm_exec/vmm_execrc", vmm_execrc())):
    with open(f"{sys.argv[1]}/{name}", "w") as file:
        file.write(text)
PYTHON
    chmod 640 "$1/etc/one/oned.conf" "$1/etc/one/vmm_exec/vmm_execrc"
}

recorder() { # recorder FILE: a stock script that notes what it gets, answers with a line, and ends with 37
    cat >"$1" <<'SH'
#!/bin/sh
here=$(dirname "$0")
printf '%s\0' "$@" >"$here/argv"
printf '%s' "$$" >"$here/pid"
cat >"$here/stdin"
printf '75b33178-6a6b-4667-b9b8-64da283038a7\n'
exit 37
SH
    chmod 755 "$1"
}
