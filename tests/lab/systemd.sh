#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# systemd as first process of processes of a node's own, over that node's files and network: lab/systemd.py starts it there as root.
#   $1 `outside`, then `inside`; $2 name of its control group
# Says the pid of systemd, as the node sees it, and ends with it. Mounts are of the new mount namespace, or gone at the end.
set -eu
if [ "$1" = outside ]; then
    # Version 2, which systemd can do all with by itself, is there beside a version 1 that a machine uses.
    at=$(mktemp -d)
    mount -t cgroup2 cgroup2 "$at"
    group=$at/$2
    mkdir "$group"
    (
        read -r self _ </proc/self/stat
        echo "$self" >"$group/cgroup.procs"
        exec unshare --cgroup --mount --ipc --pid --fork --kill-child --propagation private -- sh "$0" inside "$2"
    ) &
    until pid=$(cat "/proc/$!/task/$!/children" 2>/dev/null) && [ "$pid" ]; do sleep 0.05; done
    echo "$pid"
    wait $! || true
    until find "$group" -depth -type d -exec rmdir {} + 2>/dev/null; do sleep 0.05; done
    umount "$at"
    rmdir "$at"
    exit
fi
mount -t proc proc /proc
mount -t cgroup2 cgroup2 /sys/fs/cgroup
# Nothing of the machine's kernel is changed: what would do that finds these read-only.
for place in /sys /proc/sys; do
    mount --bind "$place" "$place"
    mount -o remount,bind,ro "$place"
done
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=1777 tmp /tmp
# What the machine has enabled is not: a test enables what it needs.
mount -t tmpfs -o mode=755 units /etc/systemd/system
for name in systemd-modules-load.service modprobe@.service; do ln -s /dev/null "/etc/systemd/system/$name"; done
mkdir -p /run/systemd/journald.conf.d
printf '%s\n' '[Journal]' Storage=volatile >/run/systemd/journald.conf.d/lab.conf
[ -s /etc/machine-id ] || tr -d - </proc/sys/kernel/random/uuid >/etc/machine-id # without one it would enable all there is
exec env -i container=lab PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --log-target=journal --unit=basic.target
