# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034
# Stand-in: what the scripts of vmm/kvm share.

# kvmrc of the tree this script stands in, wherever that is.
# shellcheck disable=SC1090
. "$(dirname -- "$0")/../../etc/vmm/kvm/kvmrc"

virsh() {
    command virsh --connect "$LIBVIRT_URI" "$@"
}

# fail TEXT: the one line that becomes the VM's error.
fail() {
    printf '%s\n' "$1" >&2
    exit 1
}

exists() {
    virsh --readonly dominfo "$1" >/dev/null 2>&1
}

# wait_gone DOMAIN SECONDS: wait until the domain is off.
wait_gone() {
    local deadline=$((SECONDS + $2))
    while exists "$1"; do
        [ "$SECONDS" -lt "$deadline" ] || return 1
        sleep 0.2
    done
}

# first_level LINK: print what a link names, one level only, if that is there; else the name itself.
first_level() {
    local to
    if [[ $1 =~ /disk\.[0-9]+$ && -L $1 ]]; then
        to=$(readlink -- "$1")
        [[ $to == /* ]] || to=$(dirname -- "$1")/$to
        if [ -e "$to" ]; then
            printf '%s\n' "$to"
            return
        fi
    fi
    printf '%s\n' "$1"
}
