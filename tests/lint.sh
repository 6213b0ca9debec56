#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# All linters over the whole tree. A linter that is not installed is skipped here and an error in CI.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/build/venv/bin:$PATH
failed=0

have() {
    command -v "$1" >/dev/null && return
    [ -n "${CI:-}" ] && failed=1
    echo "lint: $1 is not installed: ${CI:+failed}${CI:-skipped}" >&2
    return 1
}

mapfile -t shell < <(git ls-files -co --exclude-standard | while read -r file; do
    [ -f "$file" ] || continue
    IFS= read -r -n 40 first <"$file" || true
    if [[ $file =~ \.(bats|bash)$ || $first =~ ^#!/bin/(ba)?sh ]]; then echo "$file"; fi
done)

if have ruff; then
    ruff check -q lib tests bench docs || failed=1
fi
if have shellcheck && [ "${#shell[@]}" -gt 0 ]; then
    shellcheck -x -P SCRIPTDIR "${shell[@]}" || failed=1
fi
if have shfmt && [ "${#shell[@]}" -gt 0 ]; then
    shfmt -i 4 -d "${shell[@]}" || failed=1
fi
if have codespell; then
    codespell -q 3 -L conectix,nd,iif lib tm datastore vmm etc docs bench packaging README.md CONTRIBUTING.md CHANGELOG.md tests/lab tests/unit tests/tools tests/shell || failed=1
fi
/usr/bin/python3 tests/words.py || failed=1
missing=$(git ls-files -co --exclude-standard '*.py' '*.sh' '*.bash' '*.bats' tm datastore vmm | while read -r file; do
    [ -s "$file" ] || continue
    mapfile -n 4 first <"$file"
    [[ ${first[*]} == *'SPDX-License-Identifier: Apache-2.0'* ]] || echo "$file"
done)
if [ -n "$missing" ]; then
    echo "lint: no SPDX line in: $missing" >&2
    failed=1
fi
[ "$failed" = 0 ] && echo "lint: clean"
exit "$failed"
