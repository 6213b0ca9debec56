#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# What OpenNebula's monitoring and ssh start on a host: the probe, which never fails, and the host side.

setup() {
    load said
    alone
    one=$BATS_TEST_TMPDIR/one
    cp -r "$CHECKOUT/tests/lab/stock" "$one"
    "$CHECKOUT/install.sh" --remotes "$one" >/dev/null
    probe=$one/im/kvm-probes.d/host/system/semishared
    mkdir "$BATS_TEST_TMPDIR/datastores"
    printf '<PROBE><DATASTORE_LOCATION>%s</DATASTORE_LOCATION></PROBE>' "$BATS_TEST_TMPDIR/datastores" >"$BATS_TEST_TMPDIR/stdin"
}

@test "the probe prints two lines for the host's template" {
    call "$probe" <"$BATS_TEST_TMPDIR/stdin"
    exits 0
    says_nothing
    first=${output%%$'\n'*} output=${output#*$'\n'}
    [[ $first == 'HEALTH_SEMISHARED = "OK"' ]] || wrong 'not that line'
    [[ $output == "SEMISHARED = [ VERSION = \"$(version)\", HEALTH = \"OK\", "*' ]' && $output != *$'\n'* ]] || wrong 'not that line'
}

@test "the probe ends with 0 and says nothing, whatever it gets and whatever is broken: else the host were lost" {
    printf '\0\377<DATASTORE_LOCATION>' >"$BATS_TEST_TMPDIR/garbage"
    printf '<DATASTORE_LOCATION>/no/such/place</DATASTORE_LOCATION>' >"$BATS_TEST_TMPDIR/nowhere"
    for stdin in /dev/null "$BATS_TEST_TMPDIR"/{garbage,nowhere}; do
        call "$probe" <"$stdin"
        exits 0
        says_nothing
        [[ -z $output || $output == 'HEALTH_SEMISHARED = "'*'"'$'\n''SEMISHARED = ['*']' ]] || wrong 'half a line'
    done
    rm -r "$one/lib/semishared"
    call "$probe" <"$BATS_TEST_TMPDIR/stdin"
    exits 0
    says_nothing
    prints_nothing
}

@test "the host side ends with 0 when nobody speaks to it" {
    call /usr/bin/python3 -I "$one/lib/semishared/hostside.py"
    exits 0
    says_nothing
    prints_nothing
}
