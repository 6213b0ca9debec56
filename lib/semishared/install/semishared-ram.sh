#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Memory of this host as a device of its pool (class ram): zram, or brd, with XFS on it, made anew at each boot. As root, on the host:
#
#   semishared-ram enable SIZE [zram|brd] [TIMES]
#                                           have it now and at each boot; SIZE: 16G, 800M
#                                           TIMES: how many times over it is promised to disks (1 to 8; 1)
#   semishared-ram watch                    move disks away from memory that is promised more than once, before it is full, and let guests go
#                                           on that stood still meanwhile: until it is killed, one on each host (the units, or cron)
#   semishared-ram start                    make and mount it, unless it is there
#   semishared-ram stop                     unmount it: what it holds is lost, and the memory is free
#   semishared-ram disable                  stop, and no more at boot
#   semishared-ram remove                   the same, but the settings stay: the package for hosts goes
#
# The size of the device is the limit: its file system is full (ENOSPC), at which QEMU stops a guest. zram itself has none (mem_limit): where it
# refuses a page (EIO) of XFS' log, that shuts down, and every disk there is lost. What zram loses between what it has compressed, for
# which RESERVED_MEM is told of a sixteenth more, can be many times that: the kernel compacts it when memory gets scarce, a limit does not.
#
# Between zram and XFS there is dm-crypt with a cipher that changes nothing. zram takes every piece of memory for a page from its beginning. Since
# Linux 6.0 direct I/O may begin within a page, down to queue/dma_alignment, and QEMU's does: zram then stores what lies before the data, and
# reads over what lies there. dm-crypt lets through whole pages alone, which QEMU finds out and keeps to.
#
# In the environment of `enable`: DATASTORES, DATASTORE_LOCATION of OpenNebula (/var/lib/one/datastores), and RATE, the bytes per second at
# which `watch` copies disks (0: no limit). Both are kept in /etc/semishared-ram.conf.
set -eu

NAME=semishared-ram
HERE=$(dirname -- "$0")
MOUNT=/run/$NAME
OWNER=oneadmin
SETTINGS=/etc/$NAME.conf
COMMAND=/usr/local/sbin/$NAME
UNITS=/etc/systemd/system
UNIT=$UNITS/$NAME.service
PACKAGED=
DRIVERS=/var/tmp/one/lib/semishared
CRON=/etc/cron.d/$NAME

fail() {
    echo "$NAME: $*" >&2
    exit 1
}

# Print the bytes of a size such as 16G.
bytes() {
    number=${1%[MG]}
    case $number in '' | 0* | *[!0-9]* | ???????*) fail "'$1' is no size: 16G, 800M" ;; esac
    case $1 in
    *M) echo $((number << 20)) ;;
    *G) echo $((number << 30)) ;;
    *) fail "'$1' is no size: 16G, 800M" ;;
    esac
}

check() {
    size=$(bytes "$SIZE") || exit 1
    total=$(($(sed -n 's/^MemTotal: *\([0-9]*\) kB$/\1/p' /proc/meminfo) << 10))
    [ "$size" -ge $((320 << 20)) ] || fail "SIZE = $SIZE: XFS needs 320M"
    [ $((size + size / 16)) -lt "$total" ] || fail "SIZE = $SIZE: this host has $((total >> 20))M of memory"
    case $KIND in zram | brd) ;; *) fail "'$KIND' is neither zram nor brd" ;; esac
    case $TIMES in [1-8] | [1-7].[0-9]) ;; *) fail "'$TIMES' is not 1 to 8 times" ;; esac
    id -u "$OWNER" >/dev/null 2>&1 || fail "there is no user $OWNER: this is no host of OpenNebula"
    for program in mkfs.xfs modprobe findmnt; do
        command -v $program >/dev/null || fail "$program is not installed (xfsprogs, kmod, util-linux)"
    done
}

settings() {
    [ -f "$SETTINGS" ] || fail "$SETTINGS is not there: $NAME enable SIZE"
    SIZE='' KIND=zram TIMES=1 UUID='' LIB='' DATASTORES='' RATE=0
    # shellcheck source=/dev/null
    . "$SETTINGS"
    case $UUID in ????????-????-????-????-????????????) ;; *) fail "$SETTINGS has no UUID: $NAME enable SIZE" ;; esac
}

# Do what is refused while somebody looks: a round of `watch`, which goes on when that is stopped, or udev, whenever a device has changed.
insist() {
    for _ in 1 2 3 4 5 6 7 8 9; do
        if "$@" 2>/dev/null; then
            return
        fi
        sleep 1
    done
    "$@"
}

# Print how memory has to lie for direct I/O of a block device: to bytes & this; before Linux 6.0, which does not say, in pages.
alignment() {
    cat "/sys/block/${1#/dev/}/queue/dma_alignment" 2>/dev/null || echo 4095
}

# Print the device by which $1, a zram, is used.
whole_pages() {
    if [ "$(alignment "$1")" -ge 4095 ]; then
        echo "$1"
        return
    fi
    if ! command -v dmsetup >/dev/null; then
        mend='apt-get install dmsetup'
        ! command -v dnf >/dev/null || mend='dnf install device-mapper'
        fail "dmsetup is not installed, without which this kernel's zram is not safe for disks: $mend"
    fi
    # Of a stop that was cut off.
    ! dmsetup info $NAME >/dev/null 2>&1 || release /dev/mapper/$NAME
    options='5 allow_discards same_cpu_crypt no_read_workqueue no_write_workqueue sector_size:4096'
    dmsetup create $NAME --table "0 $(blockdev --getsz "$1") crypt cipher_null-ecb - 0 $1 0 $options" >&2 ||
        fail "this kernel has no dm-crypt, without which its zram is not safe for disks: $NAME enable SIZE brd"
    mapped=/dev/$(dmsetup info -c --noheadings -o blkdevname $NAME)
    if [ "$(alignment "$mapped")" -lt 4095 ]; then
        insist dmsetup remove $NAME
        fail "this kernel's zram is not safe for disks, and its dm-crypt does not make it so: $NAME enable SIZE brd"
    fi
    echo "$mapped"
}

# Give the memory of a block device back.
release() {
    case $1 in
    /dev/dm-* | /dev/mapper/*)
        below=$(dmsetup deps -o devname $NAME | sed -n 's/.*(\(zram[0-9]*\))$/\1/p')
        insist dmsetup remove $NAME
        release "/dev/$below"
        ;;
    /dev/zram*) insist zramctl --reset "$1" ;;
    /dev/ram*) insist rmmod brd ;;
    esac
}

start() {
    settings
    check
    if mountpoint -q "$MOUNT"; then
        return
    fi
    if [ "$KIND" = zram ]; then
        [ -d /sys/class/zram-control ] || modprobe zram || fail "this kernel has no zram: $NAME enable SIZE brd"
        device=$(insist zramctl --find --size "$size") || fail "zram gives no device of $SIZE"
        trap 'release "$device"' EXIT
        used=$(whole_pages "$device")
        device=$used
    else
        [ ! -e /dev/ram0 ] || fail "brd is in use: /dev/ram0 is there"
        modprobe brd rd_nr=1 rd_size=$((size >> 10)) || fail "this kernel has no brd"
        device=/dev/ram0
    fi
    # Half of it would be a device that takes disks and is none.
    trap 'umount "$MOUNT" 2>/dev/null; release "$device"' EXIT
    mkfs.xfs -q -f "$device"
    mkdir -p "$MOUNT"
    # discard: what is deleted is memory again.
    mount -t xfs -o noatime,nosuid,nodev,discard "$device" "$MOUNT"
    mkdir "$MOUNT/.semishared"
    # The same UUID at each boot: so who had disks here is known, and is told that they are lost.
    echo "{\"version\": 1, \"uuid\": \"$UUID\", \"class\": \"ram\", \"weight\": $TIMES}" >"$MOUNT/.semishared/device.json"
    chown -R "$OWNER:" "$MOUNT"
    trap - EXIT
}

stop() {
    mountpoint -q "$MOUNT" || return 0
    device=$(findmnt -n -o SOURCE "$MOUNT")
    insist umount "$MOUNT" || fail "$MOUNT is in use: end the VMs that have disks there"
    release "$device"
}

# As the drivers' user: it is to do what they may, and no more.
watch() {
    settings
    [ "$TIMES" != 1 ] || return 0
    cd /
    exec setpriv --reuid "$OWNER" --regid "$(id -g "$OWNER")" --init-groups \
        /usr/bin/python3 -IS "$LIB/host/watch.py" "$DATASTORES" "$RATE"
}

enable() {
    datastores=${DATASTORES:-} rate=${RATE:-} UUID='' LIB='' DATASTORES=/var/lib/one/datastores RATE=0
    # What is not said now stays as it was.
    # shellcheck source=/dev/null
    [ ! -f "$SETTINGS" ] || . "$SETTINGS"
    SIZE=$1 KIND=${2:-zram} TIMES=${3:-1} DATASTORES=${datastores:-$DATASTORES} RATE=${rate:-$RATE}
    check
    [ -n "$UUID" ] || UUID=$(cat /proc/sys/kernel/random/uuid)
    [ ! -f "$HERE/../host/watch.py" ] || LIB=$(readlink -f "$HERE/..")
    # A package's command lies beside no drivers.
    [ "$LIB" ] || [ ! -f "$DRIVERS/host/watch.py" ] || LIB=$DRIVERS
    case $DATASTORES$LIB in *[!A-Za-z0-9._/-]*) fail "'$DATASTORES' is no DATASTORE_LOCATION, or '$LIB' no place of the drivers" ;; esac
    [ "$TIMES" = 1 ] || [ -f "$LIB/host/watch.py" ] || fail "TIMES = $TIMES: watch needs the drivers, and there are none beside $0"
    case $RATE in *[!0-9]*) fail "RATE = $RATE is no number of bytes" ;; esac
    printf '%s\n' "SIZE=$SIZE" "KIND=$KIND" "TIMES=$TIMES" "UUID=$UUID" "LIB=$LIB" "DATASTORES=$DATASTORES" "RATE=$RATE" >"$SETTINGS.new"
    mv "$SETTINGS.new" "$SETTINGS"
    mkdir -p "${COMMAND%/*}"
    if [ -z "$PACKAGED" ] && [ "$(readlink -f "$0")" != "$COMMAND" ]; then
        cp "$0" "$COMMAND.new"
        chmod 755 "$COMMAND.new"
        mv "$COMMAND.new" "$COMMAND"
    fi
    mountpoint -q "$MOUNT" && echo "$NAME: $MOUNT stays as it is until it is stopped, or the host is started again"
    if [ -d /run/systemd/system ]; then
        for unit in $NAME $NAME-watch; do
            [ "$PACKAGED" ] || [ ! -f "$HERE/$unit.service" ] || cp "$HERE/$unit.service" "$UNITS"
        done
        systemctl daemon-reload
        # Stopped by hand it still is what systemd takes for started.
        mountpoint -q "$MOUNT" || systemctl stop $NAME.service
        systemctl enable --now $NAME.service
        systemctl disable --now $NAME-watch.service || true
        [ "$TIMES" = 1 ] || systemctl enable --now $NAME-watch.service
    else
        watch=
        [ "$TIMES" = 1 ] || watch="* * * * * root $COMMAND watch >/dev/null 2>&1"
        if [ -d "${CRON%/*}" ]; then
            printf '%s\n' "@reboot root $COMMAND start" ${watch:+"$watch"} >"$CRON"
        else
            echo "$NAME: have '$COMMAND start' run at boot: there is neither systemd nor ${CRON%/*} here"
            [ -z "$watch" ] || echo "$NAME: have '$COMMAND watch' run all the time"
        fi
        start
    fi
    [ "$TIMES" = 1 ] || MOUNT_WORD=:$TIMES
    echo "$NAME: add $MOUNT=ram${MOUNT_WORD:-} to SEMISHARED_POOL of this host in OpenNebula, then: semishared pool add HOST"
}

remove() {
    stop
    if [ -f "$UNIT" ] && { [ -z "$PACKAGED" ] || [ -d /run/systemd/system ]; }; then
        systemctl disable --now $NAME-watch.service || true
        systemctl disable --now $NAME.service || true
        [ "$PACKAGED" ] || rm -f "$UNIT" "$UNITS/$NAME-watch.service"
        systemctl daemon-reload || true
    fi
    [ "$PACKAGED" ] || rm -f "$COMMAND"
    rm -f "$CRON"
}

disable() {
    remove
    rm -f "$SETTINGS"
}

case $#:${1:-} in
2:enable | 3:enable | 4:enable) act=enable ;;
1:start | 1:stop | 1:disable | 1:remove | 1:watch) act=$1 ;;
*)
    sed -n 's/^# \{0,1\}//; 3,14p' "$0"
    exit 1
    ;;
esac
[ "$(id -u)" = 0 ] || fail "run this as root"
shift
$act "$@"
