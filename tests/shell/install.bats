#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# install.sh: its words, its exit codes, and what it says. What it makes of trees and of configurations, killed anywhere, is
# proved in tests/tools.

setup_file() {
    load said
    load remotes
    front_end "$BATS_FILE_TMPDIR/fresh"
    cp -a "$BATS_FILE_TMPDIR/fresh" "$BATS_FILE_TMPDIR/installed"
    "$CHECKOUT/install.sh" --root "$BATS_FILE_TMPDIR/installed" >/dev/null
}

setup() {
    load said
    load remotes
    alone
    install=$CHECKOUT/install.sh
    # Where other users may look, too: bats closes its own directories.
    open=$(mktemp -d)
    chmod 755 "$open"
    root="$open/a root"
    remotes=$root/var/lib/one/remotes
    cp -a "$BATS_FILE_TMPDIR/fresh" "$root"
}

teardown() {
    rm -r "$open"
}

checkout() { # checkout DIRECTORY: a copy of what is installed, to be changed or to be read by others
    mkdir "$1"
    (cd "$CHECKOUT" && cp -r tm datastore vmm lib etc bin im install.sh "$1")
    find "$1" -name __pycache__ -prune -exec rm -r {} +
}

untouched() { # untouched COMMAND...: call it; nothing below $root is another afterwards
    local before
    before=$(listing "$root")
    call "$@"
    diff <(echo "$before") <(listing "$root")
}

@test "--help is on stdout, ends with 0, and names every option" {
    for word in --help -h; do
        shows_help install.sh "$install" "$word"
        for option in --uninstall --apply --dry-run --diff --yes --force --hosts --remotes --etc --root --no-config --timers --detach-timer; do
            prints "  $option"
        done
    done
}

@test "wrong words: 1, one line, nothing touched" {
    for word in --wipe --dry wipe '' -n 'two words' $'two\nlines'; do
        untouched "$install" --root "$root" "$word"
        one_line 1 "install.sh: unknown argument '"
        says '--help shows all'
    done
    untouched "$install" --root "$root" --uninstall --apply
    one_line 1 'install.sh: argument --apply: not allowed with argument --uninstall'
}

@test "an option without its value, or with an empty one, as an unset variable leaves it: 1 and one line" {
    cd "$remotes" # where an empty name would lead
    for option in --remotes --etc --root --hosts; do
        untouched "$install" "$option"
        one_line 1 'install.sh: '
        says "$option"
        says needs
        untouched "$install" --dry-run "$option="
        one_line 1 'install.sh: '
        says "$option"
        untouched "$install" --dry-run "$option" ''
        one_line 1 'install.sh: '
        says needs
    done
}

@test "directories that are no OpenNebula's: 1 and one line" {
    call "$install" --remotes "$BATS_TEST_TMPDIR/none"
    one_line 1 "install.sh: $BATS_TEST_TMPDIR/none is not a directory"
    call "$install" --remotes $'/no\nne'
    one_line 1 'install.sh: /no ne is not a directory'
    call "$install" --root "$BATS_TEST_TMPDIR/none"
    one_line 1 "install.sh: $BATS_TEST_TMPDIR/none/var/lib/one/remotes is not a directory"
    call "$install" --remotes "$BATS_TEST_TMPDIR"
    one_line 1 "install.sh: $BATS_TEST_TMPDIR is not a remotes directory of OpenNebula: it has no vmm/kvm/deploy"
    untouched "$install" --remotes "$remotes" --etc /nowhere
    one_line 1 'install.sh: there is no /nowhere/oned.conf'
    rm -r "${root:?}/etc"
    untouched "$install" --root "$root"
    one_line 1 "install.sh: there is no $root/etc/one/oned.conf"
    says '--no-config edits none'
}

@test "no python3, one that is too old, and no checkout around it: 1 and one line" {
    checkout "$BATS_TEST_TMPDIR/checkout"
    cd "$BATS_TEST_TMPDIR/checkout"
    sed -i 's:/usr/bin/python3:/usr/bin/python-none:' install.sh
    untouched ./install.sh --root "$root"
    one_line 1 'install.sh: /usr/bin/python-none is missing: install python3 (3.9 or newer)'
    printf '#!/bin/sh\nexit 1\n' >python2
    chmod 755 python2
    sed -i "s:/usr/bin/python-none:$PWD/python2:" install.sh
    untouched ./install.sh --root "$root"
    one_line 1 "install.sh: $PWD/python2 is older than 3.9"
    cp "$install" "$BATS_TEST_TMPDIR/install.sh"
    untouched "$BATS_TEST_TMPDIR/install.sh" --root "$root"
    one_line 1 "install.sh: $BATS_TEST_TMPDIR/lib/semishared/install/main.py is missing"
}

@test "by a relative name, through a link, from any directory, whatever CDPATH says" {
    cd "$open"
    call "$(realpath --relative-to=. "$install")" --dry-run --root 'a root'
    exits 0
    prints "would make $remotes/vmm/semishared"
    ln -s "$install" link
    call ./link --dry-run --root "$root"
    exits 0
    prints "would make $remotes/vmm/semishared"
    mkdir -p "elsewhere/${CHECKOUT##*/}"
    cd "$CHECKOUT/.."
    CDPATH=$BATS_TEST_TMPDIR/elsewhere call "${CHECKOUT##*/}/install.sh" --dry-run --root "$root"
    exits 0
    says_nothing
    prints "would make $remotes/vmm/semishared"
}

@test "ONE_LOCATION is where a self-contained OpenNebula is" {
    mkdir -p "$BATS_TEST_TMPDIR/one/var"
    mv "$remotes" "$BATS_TEST_TMPDIR/one/var/remotes"
    ONE_LOCATION=$BATS_TEST_TMPDIR/one call "$install" --no-config
    exits 0
    says_nothing
    [ -d "$BATS_TEST_TMPDIR/one/var/remotes/tm/semishared" ]
}

@test "--etc and --no-config say which configuration is edited, if any" {
    cp -a "$remotes" "$BATS_TEST_TMPDIR/elsewhere"
    untouched "$install" --remotes "$BATS_TEST_TMPDIR/elsewhere"
    exits 0
    prints 'no oned.conf was found beside this remotes directory, and none was edited (--etc DIR)'
    call "$install" --remotes "$BATS_TEST_TMPDIR/elsewhere" --etc "$root/etc/one"
    exits 0
    prints "edit $root/etc/one/oned.conf"
    grep -q semishared "$root/etc/one/oned.conf"
    [ ! -e "$remotes/tm/semishared" ]
    rm -r "${root:?}/etc"
    call "$install" --root "$root" --no-config
    exits 0
    says_nothing
    [ -d "$remotes/tm/semishared" ]
}

@test "what was done is on stdout, and at its end the three commands that come next; the second run has nothing to do" {
    call "$install" --root "$root"
    exits 0
    says_nothing
    next=${output#*done; next, in this order:}
    [ "$next" != "$output" ] || wrong 'not what comes next'
    [[ $next == *"1. "*"onehost sync --force"*"2. "*restart*"3. "*"semishared' setup --apply"* ]] || wrong 'not the three commands'
    template=$remotes/lib/semishared/failover.tmpl
    prints "onehook create '$template'"
    untouched "$install" --root "$root"
    exits 0
    says_nothing
    [[ $output == 'nothing to do in '* ]] || wrong 'there was something to do'
    # What `onehook create` is given is what the operator's command prints, and starts that.
    call "$remotes/lib/semishared/semishared" failover --print-hook
    exits 0
    diff <(printf '%s\n' "$output") "$template"
    prints "COMMAND = \"$remotes/lib/semishared/semishared failover --hook\""
}

@test "a version of OpenNebula that is too old is refused, one that is new or unknown is warned of on stderr" {
    echo 6.8.3 >"$remotes/VERSION"
    untouched "$install" --root "$root"
    one_line 1 'install.sh: OpenNebula 6.8.3 is too old'
    echo 8.0.0 >"$remotes/VERSION"
    untouched "$install" --root "$root" --dry-run
    exits 0
    begins 'install.sh: warning: OpenNebula 8.0.0 is newer than what was tried'
    rm "$remotes/VERSION"
    untouched "$install" --root "$root" --dry-run
    exits 0
    begins 'install.sh: warning: the version of OpenNebula is unknown'
}

@test "who may not write, or not read, is told which user may: 1 and one line" {
    [ "$(id -u)" = 0 ] || skip 'root drops its rights to become others'
    checkout "$open/checkout"
    chown -R 9869:9869 "$root/var"
    chown 0:9869 "$root"/etc/one/oned.conf "$root"/etc/one/vmm_exec/vmm_execrc
    as() { # as UID WORD...
        untouched setpriv "--reuid=$1" "--regid=$1" --clear-groups "$open/checkout/install.sh" "${@:2}"
    }
    as 65534 --remotes /usr/lib --dry-run
    one_line 1 'install.sh: /usr/lib is not a remotes directory'
    as 65534 --root "$root"
    one_line 1 'install.sh: '
    says 'cannot read'
    says 'run this as root'
    chmod 750 "$root/var/lib/one"
    for option in --dry-run --no-config; do
        as 65534 --root "$root" "$option"
        one_line 1 "install.sh: $remotes: permission denied: nobody may not search $root/var/lib/one: run this as root"
    done
    chmod 755 "$root/var/lib/one"
    as 65534 --root "$root" --no-config
    one_line 1 "install.sh: $root/var/lib/one/remotes is not writable for nobody: run this as root or oneadmin"
    as 65534 --remotes "$root/var/lib/one/remotes" --no-config
    one_line 1 "install.sh: $root/var/lib/one/remotes is not writable for nobody"
    as 9869 --root "$root"
    one_line 1 "install.sh: $root/etc/one/vmm_exec is not writable for "
    says 'run this as root'
    as 9869 --root "$root" --diff
    exits 0
}

@test "what is mounted read-only: 1 and one line" {
    [ "$(id -u)" = 0 ] || skip 'root mounts'
    for part in etc/one var/lib/one/remotes; do
        # shellcheck disable=SC2016 # the inner shell's
        untouched unshare -m sh -c 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec "$2" --root "$3"' \
            sh "$root/$part" "$install" "$root"
        one_line 1 'install.sh: '
        says 'mounted read-only'
    done
}

@test "a full disk under stdout: one line; the second run ends it" {
    call sh -c 'exec "$@" >/dev/full' sh "$install" --root "$root"
    one_line 1 'install.sh: No space left on device; run it again when that is mended'
    call "$install" --root "$root"
    exits 0
    diff <(listing "$remotes" | grep -c .) <(listing "$BATS_FILE_TMPDIR/installed/var/lib/one/remotes" | grep -c .)
    call sh -c 'exec "$@" >/dev/full' sh "$install" --help
    one_line 1 'install.sh: No space left on device'
}

@test "taken out again: 0, and a second time there is nothing to do" {
    cp -a "$BATS_FILE_TMPDIR/installed" "$BATS_TEST_TMPDIR/installed"
    call "$install" --root "$BATS_TEST_TMPDIR/installed" --uninstall
    exits 0
    says_nothing
    prints "remove $BATS_TEST_TMPDIR/installed/var/lib/one/remotes/vmm/semishared"
    prints 'onehook delete ID of semishared-failover'
    call "$install" --root "$BATS_TEST_TMPDIR/installed" --uninstall
    exits 0
    prints 'nothing to do in '
}
