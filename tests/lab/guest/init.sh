#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=dash
# First process of a lab guest: load the drivers, then become the agent on the serial console. (busybox: the shell of
# the initramfs; commands are its own.)
/bin/busybox mkdir -p /proc /sys /dev /mnt
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs dev /dev
while read -r name; do
    /bin/busybox insmod "/modules/$name.ko" 2>/dev/null
done </modules/order
[ ! -d /sys/firmware/efi ] || /bin/busybox mount -t efivarfs efivarfs /sys/firmware/efi/efivars
while :; do
    /bin/busybox setsid /bin/busybox cttyhack /bin/agent </dev/ttyS0 >/dev/ttyS0 2>&1
done
