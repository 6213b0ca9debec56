#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=dash disable=SC2154
# First process of a kernel host: the machine's own root file system (virtiofs, read-only) below a tmpfs, then the agent.
# What it needs to know is on the kernel's command line: kh_checkout, kh_address, kh_uid, kh_gid, kh_name,
# and kh_systemd, if systemd is to be started as on a host: then the agent is a unit.
/bin/busybox mkdir -p /proc /sys /dev /machine /upper /root
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
while read -r name; do
    insmod "/modules/$name.ko"
done </modules/order
for word in $(cat /proc/cmdline); do
    case $word in kh_*=*) eval "${word%%=*}='${word#*=}'" ;; esac
done
fail() {
    echo "kernel host: $*"
    poweroff -f
}
mount -t virtiofs -o ro machine /machine || fail "the machine's files are not there"
mount -t tmpfs -o size=70%,mode=755 upper /upper
mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/machine,upperdir=/upper/files,workdir=/upper/work overlay /root || fail "no overlay"
for name in proc sys dev; do mount --move "/$name" "/root/$name"; done
for name in run tmp dev/shm; do
    mkdir -p "/root/$name"
    mount -t tmpfs -o mode=1777 tmpfs "/root/$name"
done
chmod 755 /root/run
mkdir -p /root/"$kh_checkout" # it may lie in what is empty now
mount --bind /machine/"$kh_checkout" /root/"$kh_checkout" || fail "the checkout is not there"
way=$(dirname "$kh_checkout")
while [ "$way" != / ]; do
    chmod a+x "/root$way" # a checkout in the home of root is for every user here
    way=$(dirname "$way")
done
mkdir -p /root/dev/pts
mount -t devpts -o mode=620,ptmxmode=666 devpts /root/dev/pts
rm -f /root/etc/mtab
ln -s /proc/self/mounts /root/etc/mtab
grep -q '^oneadmin:' /root/etc/passwd || echo "oneadmin:x:$kh_uid:$kh_gid::/var/lib/one:/bin/bash" >>/root/etc/passwd
grep -q '^oneadmin:' /root/etc/group || echo "oneadmin:x:$kh_gid:" >>/root/etc/group
mkdir -p /root/var/lib/one/datastores
chown "$kh_uid:$kh_gid" /root/var/lib/one /root/var/lib/one/datastores
hostname "$kh_name"
echo "$kh_name" >/root/etc/hostname
ip link set lo up
if [ -n "$kh_address" ] && ip link set eth0 up; then
    ip addr add "$kh_address/24" brd + dev eth0
fi
# Where no systemd runs, each program that looks a user up, as sudo, would load its library to ask it in vain.
[ -n "$kh_systemd" ] || sed -i '/^[a-z]*:/s/ systemd//' /root/etc/nsswitch.conf
if [ -n "$kh_systemd" ]; then
    # What this machine has enabled is not: a test enables what it needs.
    units=/root/etc/systemd/system
    rm -rf "$units"/*.wants /root/etc/fstab
    mkdir -p "$units/sysinit.target.wants"
    # There from the first moment to the last: no dependencies, nor an end by systemd.
    printf '%s\n' '[Unit]' DefaultDependencies=no IgnoreOnIsolate=yes '[Service]' Restart=always KillMode=process \
        "ExecStart=/usr/bin/python3 -IS $kh_checkout/tests/lab/kernel/agent.py" >"$units/kernel-host.service"
    ln -s ../kernel-host.service "$units/sysinit.target.wants"
    exec switch_root /root /lib/systemd/systemd
fi
exec switch_root /root /bin/sh -c 'while :; do /usr/bin/python3 -IS "$0"/tests/lab/kernel/agent.py || sleep 1; done' "$kh_checkout"
