#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Make this Debian 12 machine able to run the lab: install the packages of packages.txt that are missing (with the
# words `full` and `packaging` those of packages-full.txt and packages-packaging.txt too) and give QEMU the name OpenNebula's domain XML uses. Safe to repeat; does nothing when all is there.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
lists=("$here/packages.txt")
for more in "$@"; do lists+=("$here/packages-$more.txt"); done
policy=/usr/sbin/policy-rc.d
emulator=/usr/bin/qemu-kvm-one

say() { printf 'provision: %s\n' "$*"; }
die() {
    printf 'provision: %s\n' "$*" >&2
    exit 1
}

missing_packages() {
    local name status
    while read -r name; do
        status=$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null) || status=
        [ "$status" = installed ] || printf '%s\n' "$name"
    done < <(sed -e 's/#.*//' -e 's/[[:space:]]//g' -e '/^$/d' "${lists[@]}")
}

# apt asks policy-rc.d before it starts a daemon: 101 means no. A machine's own policy is left as it is.
own_policy=
forbid_daemons() {
    [ -e "$policy" ] && return
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    own_policy=yes
}
restore_policy() { [ -z "$own_policy" ] || rm -f "$policy"; }

apt() { # apt WORDS...: quiet, but say that it is alive; show the end of the log only when it fails
    local log pid
    log=$(mktemp)
    DEBIAN_FRONTEND=noninteractive apt-get -q -o APT::Update::Error-Mode=any -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        printf '.'
    done
    printf '\n'
    if ! wait "$pid"; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}

[ "$(id -u)" = 0 ] || die "must run as root (it installs packages and the lab makes namespaces)"
command -v apt-get >/dev/null || die "needs a Debian 12 machine: there is no apt-get"

mapfile -t missing < <(missing_packages)
if [ "${#missing[@]}" -gt 0 ]; then
    trap restore_policy EXIT
    forbid_daemons
    say "reading the package lists"
    apt update || die "apt-get update failed: check the network and /etc/apt/sources.list"
    say "installing ${#missing[@]} packages: ${missing[*]}"
    apt install -y --no-install-recommends "${missing[@]}" || die "apt-get install failed: see the lines above"
fi

if [ ! -e "$emulator" ]; then
    ln -s qemu-system-x86_64 "$emulator"
fi
say "ready"
