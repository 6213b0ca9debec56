#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# datastore/*: an id in argv, base64 of XML on stdin, the answer alone on stdout; else exit code 1 and one line.

setup() {
    load said
    alone
}

@test "every datastore action without an id: one line" {
    for file in "$CHECKOUT"/datastore/*[a-z]; do
        call "$file"
        refuses "${file##*/}"
        says 'no id'
    done
}

@test "every datastore action with anything but its XML on stdin: one line" {
    mkdir "$BATS_TEST_TMPDIR/stdin"
    cd "$BATS_TEST_TMPDIR/stdin"
    : >empty
    printf 'xxx' >no-base64
    printf '!!!' >no-base64-at-all
    printf '\377\0\200' >bytes
    printf '<VM/>' | base64 >another-root
    for file in "$CHECKOUT"/datastore/*[a-z]; do
        for stdin in *; do
            call "$file" 7 <"$stdin"
            refuses "${file##*/}"
            says 'SS001'
        done
    done
}

@test "every datastore action with XML that says nothing: one line" {
    for file in "$CHECKOUT"/datastore/*[a-z]; do
        call "$file" 7 <<<"$(printf '<DS_DRIVER_ACTION_DATA/>' | base64)"
        refuses "${file##*/}"
    done
}

message() { # message PATH: what oned sends for an upload of that file
    printf '<DS_DRIVER_ACTION_DATA><IMAGE><ID>4</ID><PATH>%s</PATH></IMAGE><DATASTORE><ID>100</ID><BASE_PATH>%s</BASE_PATH>
<TEMPLATE><SAFE_DIRS>%s</SAFE_DIRS></TEMPLATE></DATASTORE></DS_DRIVER_ACTION_DATA>' \
        "$1" "$BATS_TEST_TMPDIR/store" "$BATS_TEST_TMPDIR" | base64 -w0
}

@test "the answer is alone on stdout; one that nobody gets is a failure in one line" {
    truncate -s 3M "$BATS_TEST_TMPDIR/image"
    message "$BATS_TEST_TMPDIR/image" >"$BATS_TEST_TMPDIR/stdin"
    call "$CHECKOUT/datastore/stat" 7 <"$BATS_TEST_TMPDIR/stdin"
    exits 0
    says_nothing
    [ "$output" = 3 ] || wrong 'not 3 MiB'
    call sh -c 'exec "$@" >/dev/full' sh "$CHECKOUT/datastore/stat" 7 <"$BATS_TEST_TMPDIR/stdin"
    refuses stat
    says 'No space left on device'
}
