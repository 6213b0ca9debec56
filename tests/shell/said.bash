# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154 # status, output and stderr are what bats' `run` found
# How a program is called here, and what it said and how it ended, in the words of the contract.
bats_require_minimum_version 1.5.0

# What other users are to read, whatever the tests were started with.
umask 022

export CHECKOUT
CHECKOUT=$(cd -- "${BASH_SOURCE[0]%/*}/../.." && pwd)

# As oned calls: nothing on stdin that the test does not give. There is no oned, and no session with one.
alone() {
    exec </dev/null
    export HOME=$BATS_TEST_TMPDIR ONE_XMLRPC=http://127.0.0.1:1/RPC2
    unset ONE_AUTH ONE_LOCATION PYTHONPATH
}

call() { # call PROGRAM WORD...: run it; then $status, $output and $stderr are there
    run --separate-stderr "$@"
}

wrong() { # wrong WHAT: fail the test, and show all
    printf '%s\n' "$1" "called: $BATS_RUN_COMMAND" "exit code: $status" "stdout: $output" "stderr: $stderr"
    return 1
}

exits() { # exits CODE
    [ "$status" -eq "$1" ] || wrong "not exit code $1"
}

prints() { # prints WORDS: they are on stdout
    [[ $output == *"$1"* ]] || wrong "not on stdout: $1"
}

prints_nothing() {
    [ -z "$output" ] || wrong "stdout is not empty"
}

says() { # says WORDS: they are on stderr
    [[ $stderr == *"$1"* ]] || wrong "not on stderr: $1"
}

begins() { # begins WORDS: stderr does so
    [[ $stderr == "$1"* ]] || wrong "stderr does not begin with $1"
}

last_line_says() { # last_line_says WORDS
    [[ ${stderr##*$'\n'} == *"$1"* ]] || wrong "the last line of stderr does not say $1"
}

says_nothing() {
    [ -z "$stderr" ] || wrong "stderr is not empty"
}

one_line() { # one_line CODE START: it ended so, with one line on stderr that starts so, and nothing on stdout
    exits "$1"
    prints_nothing
    [[ $stderr == "$2"* && $stderr != *$'\n'* ]] || wrong "not one line that starts with $2"
}

# Of an action or a hypervisor script: the one line that becomes the user's message begins with an error's id, and ends in the
# action's name and what paths there are. Log lines come behind it; none begins with a number behind its prefix, which would crash oned.
refuses() { # refuses ACTION [CODE]
    local line plain=()
    exits "${2:-1}"
    prints_nothing
    while IFS= read -r line; do
        [[ $line =~ ^(ERROR|INFO|WARN|DEBUG):\ +[0-9] ]] && wrong "this line crashes oned: $line"
        [[ $line =~ ^(ERROR|INFO|WARN|DEBUG):\  ]] || plain+=("$line")
    done <<<"$stderr"
    [ "${#plain[@]}" -eq 1 ] || wrong "${#plain[@]} lines for the user"
    [[ ${plain[0]} =~ ^SS[0-9]{3}\ .*\["$1"(;\ .*)?\]$ ]] || wrong "not 'SSnnn ... [$1]'"
    [[ ${stderr%%$'\n'*} == "${plain[0]}" ]] || wrong 'log lines stand before the line for the user'
    iconv -f ASCII -t ASCII <<<"$stderr" >/dev/null || wrong 'not ASCII'
}

shows_help() { # shows_help COMMAND PROGRAM WORD...: run it; it shows the usage of COMMAND
    call "${@:2}"
    exits 0
    says_nothing
    [[ $output == "usage: $1 "* ]] || wrong 'no usage'
}

version() { # that of the checkout
    sed -n 's/^VERSION = "\(.*\)"$/\1/p' "$CHECKOUT/lib/semishared/__init__.py"
}

listing() { # listing DIRECTORY: all below it, with type, mode and owner; what is no directory with its time too, files with a hash
    (cd -- "$1" && find . -type d -printf '%P %y %m %U:%G\n' -o -printf '%P %y %m %U:%G %T@ %l\n' | sort &&
        find . -type f -exec sha256sum {} + | sort)
}
