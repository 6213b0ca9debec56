#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Run tests over and over, with other random seeds each time and a busy loop on each core beside them.
#
#     tests/repeat.sh [--quiet] N SUITE|FILE...      until each has passed N times in a row since it last failed
#
# Each run is a line of build/repeats/ledger.tsv: name, what it ran on, seed, `passed` or `failed`, seconds, counts. Who starts it
# again goes on where it stopped. A run that fails ends it with 1; its log stays beside the ledger. --quiet: without the load.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=build/repeats
ledger=$folder/ledger.tsv
load=yes
loops=()

usage() {
    sed -n '4,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
end_load() { [ "${#loops[@]}" = 0 ] || kill "${loops[@]}" 2>/dev/null || true; }
begin_load() {
    trap end_load EXIT
    for _ in $(seq "$(nproc)"); do
        (while :; do :; done) &
        loops+=("$!")
    done
}

# How often it has passed since it last failed.
passed() { awk -F '\t' -v name="$1" '$1 == name { n = $4 == "passed" ? n + 1 : 0 } END { print n + 0 }' "$ledger"; }

run() { # NAME LOG: a suite by its name, else files for pytest
    if [[ $1 == */* ]]; then
        PYTHONPATH=tests:lib /usr/bin/python3 -m pytest -q -p no:cacheprovider -m "not long" "$1"
    else
        PYTHONPATH=tests:lib /usr/bin/python3 tests/suites.py "$1"
    fi >"$2" 2>&1
}

[ "${1-}" != --quiet ] || { load= && shift; }
[[ ${1-} =~ ^[1-9][0-9]*$ && $# -ge 2 ]] || usage
wanted=$1
shift
mkdir -p "$folder"
touch "$ledger"
[ -z "$load" ] || begin_load
for name in "$@"; do
    while [ "$(passed "$name")" -lt "$wanted" ]; do
        seed=$((RANDOM * 32768 + RANDOM))
        log=$folder/${name//\//_}-$seed.log
        begun=$SECONDS
        result=passed
        # What of a test is random by Python's hashes or hypothesis is so by this; UUIDs are others each time anyway.
        PYTEST_ADDOPTS="--hypothesis-seed=$seed" PYTHONHASHSEED=$seed run "$name" "$log" || result=failed
        counts=$(tail -n 1 "$log")
        tree=$(git rev-parse --short HEAD)$(git diff --quiet HEAD || echo +)
        printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$name" "$tree" "$seed" "$result" "$((SECONDS - begun))" "$counts" >>"$ledger"
        printf '%s: %s, seed %s, %s s: %s\n' "$name" "$result" "$seed" "$((SECONDS - begun))" "$counts"
        if [ "$result" = failed ]; then
            echo "see $log" >&2
            exit 1
        fi
        rm -f "$log"
    done
    printf '%s: passed %s times in a row\n' "$name" "$(passed "$name")"
done
