#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# bin/semishared: help on stdout with 0; a wrong word, or nobody to ask, with 2 and what is wrong in the last line of stderr.

setup() {
    load said
    alone
    semishared=$CHECKOUT/bin/semishared
    COLUMNS=120
    export COLUMNS
}

subcommands() { # those that there are, by their modules: each has ARGUMENTS
    grep -l '^def run(' "$CHECKOUT"/lib/semishared/cli/*.py | while read -r file; do
        grep -q '^ARGUMENTS = ' "$file" && basename "$file" .py | tr _ -
    done | grep -vx hosts
}

@test "--help names every subcommand, --version the version" {
    for word in --help -h; do
        shows_help semishared "$semishared" "$word"
        for name in $(subcommands); do
            prints "    $name"
        done
    done
    call "$semishared" --version
    exits 0
    says_nothing
    # And the commit, where it is known.
    [[ $output == "semishared $(version)"?(" ("*")") ]] || wrong 'not the version'
}

@test "--help of every subcommand is on stdout, ends with 0, and says the exit codes" {
    [ "$(subcommands | wc -l)" -ge 8 ]
    for name in $(subcommands); do
        shows_help "semishared $name" "$semishared" "$name" --help
        prints 'exit codes: 0 '
    done
}

refused_word() { # refused_word LAST-LINE: exit code 2, nothing on stdout, a usage and then that line
    exits 2
    prints_nothing
    begins 'usage: semishared '
    last_line_says "$1"
}

@test "no subcommand, and one that there is not: 2, and the last line says which there are" {
    call "$semishared"
    refused_word 'semishared: error: the following arguments are required: COMMAND'
    for word in nosuch '' 'two words' --nosuch; do
        call "$semishared" "$word"
        refused_word 'semishared: error: '
    done
    call "$semishared" nosuch
    refused_word "'doctor'"
}

@test "a wrong word behind any subcommand: 2, and the usage of that subcommand" {
    for name in $(subcommands); do
        [ "$name" != plan ] || continue # what follows is the action's
        call "$semishared" "$name" --nosuch
        exits 2
        prints_nothing
        begins "usage: semishared $name "
        last_line_says "semishared $name: error: "
    done
    call "$semishared" plan
    refused_word 'required: ACTION, ARGUMENT'
    call "$semishared" base nosuch
    refused_word "invalid choice: 'nosuch'"
    call "$semishared" status 1 2
    refused_word 'unrecognized arguments: 2'
    call "$semishared" setup --apply --out /tmp
    refused_word 'not allowed with'
}

@test "what a subcommand cannot use is one line" {
    call "$semishared" setup --set x
    one_line 1 "semishared setup: not NAME=VALUE: 'x'"
    call "$semishared" caps
    one_line 2 'semishared caps: name a datastore'
    call "$semishared" plan nosuch 1
    one_line 1 'semishared plan: nosuch is no transfer action'
    call "$semishared" plan clone 1
    one_line 1 'SS001 clone: 1 arguments where 4 belong'
}

@test "where no oned answers: 2, and one line with its error" {
    call "$semishared" setup --apply
    one_line 2 'semishared setup: SS004 no OpenNebula session in '
    says 'SS004'
    echo oneadmin:secret >"$HOME/one_auth"
    export ONE_AUTH=$HOME/one_auth
    for words in 'setup --apply' 'caps 100' 'plan clone fe:/d/100/x h1:/d/101/7/disk.0 7 100'; do
        # shellcheck disable=SC2086 # words
        call "$semishared" $words
        one_line 2 "semishared ${words%% *}: SS004 oned does not answer one."
        says "$ONE_XMLRPC"
        says 'SS004'
    done
}

@test "root is sent away where files of root would be in the drivers' way" {
    [ "$(id -u)" = 0 ] || skip 'root only'
    for words in 'base list' doctor gc 'stage 1' status; do
        # shellcheck disable=SC2086 # words
        call "$semishared" $words
        one_line 2 "semishared ${words%% *}: run this as oneadmin"
    done
}

@test "whoever reads only the first line, or nothing, is not bothered" {
    for words in setup --help 'gc --help'; do
        # shellcheck disable=SC2086 # words
        call bash -c 'set -o pipefail; "$@" | :' bash "$semishared" $words
        says_nothing
        [ "$status" -le 2 ] || wrong 'not one of our exit codes'
    done
}

@test "an answer that does not fit on the disk is a failure in one line" {
    for words in setup --help 'gc --help'; do
        # shellcheck disable=SC2086 # words
        call sh -c 'exec "$@" >/dev/full' sh "$semishared" $words
        one_line 2 'semishared'
        says 'No space left on device'
    done
}

@test "called through a link, by a relative name, from a directory with modules of the same names" {
    ln -s "$semishared" "$BATS_TEST_TMPDIR/command"
    echo 'raise SystemExit("not mine")' >"$BATS_TEST_TMPDIR/argparse.py"
    cd "$BATS_TEST_TMPDIR"
    PYTHONPATH=. call ./command --version
    exits 0
    prints 'semishared '
}
