#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# tm/*: what oned sees of a transfer action that cannot do its work. Exit code 1, one line for the user, nothing on stdout.

setup() {
    load said
    alone
    store=/var/lib/one/datastores/100
    vm_dir=/var/lib/one/datastores/101/7
}

arguments() { # arguments ACTION: sets `good` to arguments of the right shape
    local disk=h1:$vm_dir/disk.0
    case $1 in
    clone | ln) good=("fe:$store/x" "$disk" 7 100) ;;
    mkimage) good=(8 raw "$disk" 7 101) ;;
    mkswap) good=(8 "$disk" 7 101) ;;
    context) good=(/etc/hostname "$disk" 7 101) ;;
    mvds) good=("$disk" "$store/x" 7 100) ;;
    cpds) good=("$disk" "$store/y" -1 7 100) ;;
    delete) good=("h1:$vm_dir" 7 101) ;;
    mv) good=("h1:$vm_dir" "h2:$vm_dir" 7 101) ;;
    premigrate | postmigrate | failmigrate) good=(h1 h2 "$vm_dir" 7 101) ;;
    snap_*) good=("$disk" 0 7 100) ;;
    resize) good=("$disk" 8 7 100) ;;
    prebackup* | postbackup*) good=("h1:$vm_dir" 0:1 one-7 - 7 101) ;;
    restore) good=("h1:$vm_dir" 7 4 -1 -1) ;;
    monitor_ds) good=("$vm_dir") ;;
    *) return 1 ;;
    esac
}

@test "every transfer action without arguments: one line" {
    for file in "$CHECKOUT"/tm/*[a-z]; do
        call "$file"
        refuses "${file##*/}"
    done
}

@test "every transfer action with --help: an action has no options" {
    for file in "$CHECKOUT"/tm/*[a-z]; do
        call "$file" --help
        refuses "${file##*/}"
    done
}

@test "every transfer action with one argument too few, or three too many: one line" {
    for file in "$CHECKOUT"/tm/*[a-z]; do
        action=${file##*/}
        [ "$action" != monitor ] || continue # is always refused
        arguments "$action"
        call "$file" "${good[@]:0:${#good[@]}-1}"
        refuses "$action"
        # context takes any number of files: there it is the place of the disk that is wrong.
        call "$file" "${good[@]}" more more more
        refuses "$action"
    done
}

@test "an argument can be any bytes, in any locale: still one line" {
    for evil in '' -n 12 'ERROR: 12' $'a\nERROR: 12 b' $'\r7' 'żółw 猫' $'\xff\xfe' $'\e[31m'; do
        for locale in C C.UTF-8; do
            LC_ALL=$locale call "$CHECKOUT/tm/clone" "fe:$store/$evil" "h1:$vm_dir/$evil" "$evil" "$evil"
            refuses clone
        done
    done
}

@test "without a session with oned, and where no oned listens: one line that says so" {
    arguments clone
    call "$CHECKOUT/tm/clone" "${good[@]}"
    refuses clone
    begins 'SS004 VM 7 disk 0: no OpenNebula session in '
    says "[clone; $HOME/.one/one_auth]"
    says 'SS004'
    echo oneadmin:secret >"$HOME/one_auth"
    ONE_AUTH=$HOME/one_auth call "$CHECKOUT/tm/clone" "${good[@]}"
    refuses clone
    begins 'SS004 VM 7 disk 0: oned does not answer one.vm.info 7: '
    says "$ONE_XMLRPC"
    says 'SS004'
}

@test "an action is called by any name of its path, and takes nothing from where it is called or from PYTHONPATH" {
    mkdir -p "$BATS_TEST_TMPDIR/here/semishared"
    for name in semishared/__init__ json os sitecustomize; do
        echo 'raise SystemExit("not mine")' >"$BATS_TEST_TMPDIR/here/$name.py"
    done
    cd "$BATS_TEST_TMPDIR/here"
    PYTHONPATH=$PWD PYTHONSTARTUP=$PWD/json.py call "$(realpath --relative-to=. "$CHECKOUT")/tm/clone"
    refuses clone
    says '0 arguments where 4 belong'
}

@test "monitor is refused whatever it is asked: no system datastore of ours is shared" {
    call "$CHECKOUT/tm/monitor" 101
    refuses monitor
    says SHARED=NO
}

@test "monitor_ds of an empty or missing directory prints nothing, which is no failure" {
    for directory in "$BATS_TEST_TMPDIR" "$BATS_TEST_TMPDIR/none"; do
        call "$CHECKOUT/tm/monitor_ds" "$directory"
        exits 0
        prints_nothing
        says_nothing
    done
}

@test "an answer that nobody gets is a failure in one line" {
    mkdir "$BATS_TEST_TMPDIR/7"
    truncate -s 1M "$BATS_TEST_TMPDIR/7/disk.0"
    call sh -c 'exec "$@" >/dev/full' sh "$CHECKOUT/tm/monitor_ds" "$BATS_TEST_TMPDIR"
    refuses monitor_ds
    says 'No space left on device'
}
