#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The hypervisor directory as a host has it: what is not about a disk of ours becomes OpenNebula's own script, which gets the
# same words and the same bytes, and whose output and exit code are the answer. Of ours nothing is loaded for that.

setup_file() {
    load said
    load remotes
    export synced="$BATS_FILE_TMPDIR/var tmp one"
    local kvm=$BATS_FILE_TMPDIR/remotes/vmm/kvm
    cp -r "$CHECKOUT/tests/lab/stock" "$BATS_FILE_TMPDIR/remotes"
    recorder "$BATS_FILE_TMPDIR/recorder"
    for script in "$kvm"/*; do
        cp "$BATS_FILE_TMPDIR/recorder" "$script"
    done
    recorder "$kvm/invented_by_8.0"
    ln -s cancel "$kvm/linked"
    recorder "$kvm/rm -rf \$HOME"
    mkdir "$kvm/a directory"
    printf 'export A=b\n' >"$kvm/kvmrc"
    "$CHECKOUT/install.sh" --remotes "$BATS_FILE_TMPDIR/remotes" >/dev/null
    # As onehost sync copies.
    mkdir "$synced"
    (cd "$BATS_FILE_TMPDIR/remotes" && rsync -LRaz --delete . "$synced")
}

setup() {
    load said
    load remotes
    alone
    one="$BATS_TEST_TMPDIR/var tmp one"
    cp -a "$synced" "$one"
    vmm=$one/vmm/semishared
    kvm=$one/vmm/kvm
    vm_dir=$BATS_TEST_TMPDIR/stores//101/7
    mkdir -p "$vm_dir"
    # shellcheck disable=SC2016 # no shell may ever expand them
    odd=('a b' '' '$(touch /tmp/x)' '`id`;' "it's" '"' -n $'new\nline' 'ü' $'\xff')
    printf '<not xml\0\377<domain/>\n\n' >"$BATS_TEST_TMPDIR/stdin"
}

break_package() { # whatever of ours is loaded now fails
    rm -r "$one/lib/semishared"
    printf '#!/bin/false\n' >"$vmm/with_records"
}

forwards() { # forwards ACTION WORD...: with stdin from $BATS_TEST_TMPDIR/stdin
    local action=$1
    shift
    rm -f "$kvm/argv" "$kvm/stdin"
    call "$vmm/$action" "$@" <"$BATS_TEST_TMPDIR/stdin"
    exits 37
    says_nothing
    [ "$output" = 75b33178-6a6b-4667-b9b8-64da283038a7 ] || wrong 'not what the stock script prints'
    printf '%s\0' "$@" | cmp - "$kvm/argv"
    cmp "$BATS_TEST_TMPDIR/stdin" "$kvm/stdin"
}

message() { # message DATASTORE-DIRECTORY [DISKS]: what oned gives to migrate and snapshot_create
    printf '<VMM_DRIVER_ACTION_DATA><HOST>h1</HOST><VM><ID>7</ID><TEMPLATE>%s</TEMPLATE></VM>
<DATASTORE><BASE_PATH><![CDATA[%s]]></BASE_PATH></DATASTORE></VMM_DRIVER_ACTION_DATA>\n\n' "${2-}" "$1" >"$BATS_TEST_TMPDIR/stdin"
}

@test "every executable of the stock directory has a script of that name here, and no others but ours" {
    made=$(cd "$BATS_FILE_TMPDIR/remotes/vmm/semishared" && echo *)
    stock=$(cd "$BATS_FILE_TMPDIR/remotes/vmm/kvm" && find . -maxdepth 1 \( -type f -o -type l \) -perm -100 ! -name '* *' -printf '%f\n')
    ours=$(cd "$CHECKOUT/vmm" && printf '%s\n' *[a-z])
    [ "$made" = "$(printf '%s\n' "$stock" "$ours" | LC_ALL=C sort -u | paste -sd ' ')" ]
    [[ $made == *invented_by_8.0*linked* ]]
    [[ $made != *kvmrc* && $made != *'rm -rf'* ]]
    rm "$BATS_FILE_TMPDIR/remotes/vmm/kvm/invented_by_8.0"
    "$CHECKOUT/install.sh" --remotes "$BATS_FILE_TMPDIR/remotes" >/dev/null
    [ ! -e "$BATS_FILE_TMPDIR/remotes/vmm/semishared/invented_by_8.0" ]
}

@test "an action that does not differ: words, bytes, output and exit code are the stock script's" {
    break_package
    for script in "$vmm"/*; do
        [[ ! -e "$CHECKOUT/vmm/${script##*/}" ]] || continue
        forwards "${script##*/}" "${odd[@]}"
        forwards "${script##*/}"
    done
}

@test "a VM without a record of ours: deploy, attach_disk, detach_disk, save and restore are the stock script's, however odd their words" {
    break_package
    for action in deploy attach_disk detach_disk save restore; do
        forwards "$action" "$vm_dir/deployment.0" "$vm_dir/disk.0" "${odd[@]}"
        forwards "$action"
        forwards "$action" ''
        forwards "$action" no-slash no-slash
    done
}

@test "a VM without a record of ours: migrate and snapshot_create read where it is, and hand on every byte" {
    break_package
    message "${vm_dir%/7}" '<X>ü &amp; <![CDATA[<&>]]></X>'
    forwards migrate 252e h2 h1 7 h1 "${odd[@]}"
    forwards snapshot_create 252e 0 7 h1
    message "${vm_dir%/7}" "<X>$(head -c 3000000 /dev/zero | tr '\0' x)</X>"
    forwards migrate 252e h2 h1 7 h1
}

@test "migrate and snapshot_create of a VM nobody knows where: nothing is done, one line" {
    printf '<a/>' >"$BATS_TEST_TMPDIR/root"
    printf '<VMM_DRIVER_ACTION_DATA/>' >"$BATS_TEST_TMPDIR/nothing"
    printf '<VMM_DRIVER_ACTION_DATA>' >"$BATS_TEST_TMPDIR/cut"
    message relative/101
    for stdin in /dev/null "$BATS_TEST_TMPDIR"/{root,nothing,cut,stdin}; do
        call "$vmm/migrate" 252e h2 h1 7 h1 <"$stdin"
        refuses migrate
        says 'nothing was done'
        call "$vmm/snapshot_create" 252e 0 7 h1 <"$stdin"
        refuses snapshot_create
        says 'nothing was done'
    done
    message "${vm_dir%/7}"
    for vm in ../7 '' 7x; do
        call "$vmm/migrate" 252e h2 h1 "$vm" h1 <"$BATS_TEST_TMPDIR/stdin"
        refuses migrate
        call "$vmm/snapshot_create" 252e 0 "$vm" h1 <"$BATS_TEST_TMPDIR/stdin"
        refuses snapshot_create
    done
    for action in migrate snapshot_create; do
        call "$vmm/$action" <"$BATS_TEST_TMPDIR/stdin"
        refuses "$action"
    done
    [ ! -e "$kvm/argv" ]
}

@test "a script becomes the stock one: no process stays between it and who kills it" {
    message "${vm_dir%/7}"
    for action in cancel deploy attach_disk detach_disk save restore migrate snapshot_create; do
        "$vmm/$action" "$vm_dir/a" "$vm_dir/b" 0 7 h1 <"$BATS_TEST_TMPDIR/stdin" >/dev/null 3>&- &
        wait $! || [ $? = 37 ]
        [ "$(cat "$kvm/pid")" = $! ] || wrong "$action: the stock script is another process"
    done
}

@test "the stock script is not there: not taken for done" {
    for action in cancel deploy attach_disk detach_disk save restore; do
        rm "$kvm/$action"
        run -127 --separate-stderr "$vmm/$action" "$vm_dir/deployment.0" "$vm_dir/disk.0"
        prints_nothing
        says "../kvm/$action"
    done
}

@test "a VM with records: what goes on with it refuses wrong words in one line" {
    mkdir "$vm_dir/.semishared"
    call "$vmm/attach_disk" 252e "$vm_dir/disk.5" vde
    refuses attach_disk
    says 'arguments'
    for words in '' nosuch --help; do
        # shellcheck disable=SC2086 # words
        call "$vmm/with_records" $words
        refuses with_records
        says 'is none of deploy, attach_disk, detach_disk, migrate, restore, save, snapshot_create'
    done
    for action in deploy attach_disk detach_disk migrate restore save snapshot_create; do
        call "$vmm/with_records" "$action"
        refuses "$action"
        says 'SS001'
    done
    [ ! -e "$kvm/argv" ]
}

@test "a package that is not there: a VM with records is refused, not handed over" {
    mkdir "$vm_dir/.semishared"
    break_package
    for action in deploy attach_disk detach_disk save restore; do
        call "$vmm/$action" "$vm_dir/deployment.0" "$vm_dir/disk.0" <"$BATS_TEST_TMPDIR/stdin"
        [ "$status" -ne 0 ] || wrong 'as if it had been done'
        prints_nothing
    done
    [ ! -e "$kvm/argv" ]
}

share() { # share TM_MAD: the VM has a directory of that driver's for a disk, as vm.xml says it
    printf '<VM><TEMPLATE><DISK><DISK_ID>1</DISK_ID><IMAGE_ID>4</IMAGE_ID><MOUNT_TAG><![CDATA[tag]]></MOUNT_TAG>
<SOURCE><![CDATA[%s]]></SOURCE><TYPE><![CDATA[FILESYSTEM]]></TYPE><TM_MAD><![CDATA[%s]]></TM_MAD></DISK></TEMPLATE></VM>' \
        "$BATS_TEST_TMPDIR/share-4" "$1" >"$vm_dir/vm.xml"
    printf "<domain type='kvm'><name>one-7</name><devices><filesystem type='mount'/></devices></domain>\n" >"$BATS_TEST_TMPDIR/stdin"
}

@test "a VM without records: what is no share is refused, not handed over as it came; a directory of others is" {
    share semishared
    call "$vmm/deploy" "$vm_dir/deployment.0" h1 7 h1 <"$BATS_TEST_TMPDIR/stdin"
    refuses deploy
    says 'no root of shares'
    says 'SS175'
    [ ! -e "$kvm/argv" ]
    share virtiofs
    forwards deploy "$vm_dir/deployment.0" h1 7 h1
}
