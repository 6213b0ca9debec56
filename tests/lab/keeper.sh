#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# First process of a lab: holds the "switch" (a bridge in its own network namespace) and the pid namespace all nodes
# live in. Killing it kills everything of the lab. It also reaps what its nodes leave behind.
set -eu
read -r pid _ </proc/self/stat # /proc is still the machine's: this is the pid as seen from outside
ip link set lo up
ip link add br0 type bridge mcast_snooping 0 stp_state 0 forward_delay 0
ip link set br0 up
# A switch has no firewall: with br_netfilter loaded it would ask one about every packet, for every host.
for call in /proc/sys/net/bridge/bridge-nf-call-*; do
    if [[ -w $call ]]; then echo 0 >"$call"; fi
done
echo "$pid"
exec >/dev/null
while :; do
    sleep 86400 &
    wait $!
done
