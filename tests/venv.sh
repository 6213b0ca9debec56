#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# tests/venv.sh VENV REQUIREMENTS - make the virtual environment of the linters. Without a network the linters are
# skipped on a developer's machine, and are an error in CI (tests/lint.sh, tests/types.sh decide).
set -euo pipefail
venv=$1
mkdir -p "$(dirname "$venv")"
if ! /usr/bin/python3 -m venv --system-site-packages "$venv" >/dev/null 2>&1; then
    rm -rf "$venv"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq >/dev/null && apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
        /usr/bin/python3 -m venv --system-site-packages "$venv"
    else
        echo "venv: python3-venv is not installed; linters are skipped" >&2
        exit 0
    fi
fi
if "$venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$2"; then
    touch "$venv/ready"
else
    echo "venv: the linters could not be installed" >&2
fi
