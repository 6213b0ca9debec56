#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# mypy over all: the package and the lab --strict, other tests and bench for names and arguments. Skipped where mypy is not installed, an error in CI.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/build/venv/bin:$PATH
if ! command -v mypy >/dev/null; then
    echo "types: mypy is not installed" >&2
    [ -z "${CI:-}" ]
    exit
fi
mypy --cache-dir build/mypy
