#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# First process of a node. Builds the node's own root file system out of the machine's programs and the node's files,
# says its pid, waits for its network cable, starts the services and then only reaps.
#   stdin:  one line when eth0 is there        stdout: the pid as seen from outside, then "ready"
#   $1 node directory; environment: LAB_NAME LAB_ADDRESS LAB_STORES LAB_SHARE LAB_CGROUPS LAB_UNIFIED LAB_KVM LAB_SHAREDFS LAB_REACH
#   LAB_ROOT (whose programs it has: empty for the machine's, else a root of another release, roots.py)
set -eu
dir=$1
root=$dir/rootfs
read -r pid _ </proc/self/stat # still the machine's /proc
hostname "$LAB_NAME"

mount -t tmpfs -o mode=755,size=16m lab-root "$root"
mkdir "$root"/{etc,var,root,opt,proc,sys,dev,run,tmp,mnt,srv,home,usr,.old}
mount --rbind "$LAB_ROOT/usr" "$root/usr"
mount -o remount,bind,ro "$root/usr" # nothing in a node can change the machine's programs
for name in bin sbin lib lib32 lib64 libx32; do
    if [ -L "$LAB_ROOT/$name" ]; then
        cp -P "$LAB_ROOT/$name" "$root/$name"
    elif [ -d "$LAB_ROOT/$name" ]; then
        mkdir "$root/$name"
        mount --rbind "$LAB_ROOT/$name" "$root/$name"
    fi
done
for name in etc var root opt; do mount --bind "$dir/$name" "$root/$name"; done
if [ -d "$root/opt/remotes" ]; then # cli/command.py, `put`
    case $LAB_NAME in fe*) scripts=var/lib/one/remotes ;; *) scripts=var/tmp/one ;; esac
    mount --bind "$root/opt/remotes" "$root/$scripts"
fi
for id in $LAB_STORES; do mount --bind "$LAB_SHARE/$id" "$root/var/lib/one/datastores/$id"; done

mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
if [ -n "$LAB_UNIFIED" ]; then
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
    mkdir -p "$root/sys/fs/cgroup/init"
    echo 0 >"$root/sys/fs/cgroup/init/cgroup.procs"
elif [ -n "$LAB_CGROUPS" ]; then
    mount -t tmpfs -o mode=755,size=1m cgroup "$root/sys/fs/cgroup"
    for name in $LAB_CGROUPS; do
        mkdir "$root/sys/fs/cgroup/$name"
        mount -t cgroup -o "$name" cgroup "$root/sys/fs/cgroup/$name"
    done
fi

mount -t tmpfs -o mode=755,size=1m dev "$root/dev"
mkdir "$root"/dev/{pts,shm,net,mapper}
devices="null zero full random urandom tty fuse net/tun"
[ "$LAB_KVM" = yes ] && devices="$devices kvm"
for name in $devices; do
    [ -c "/dev/$name" ] || continue
    cp -a "/dev/$name" "$root/dev/$name" 2>/dev/null && continue
    : >"$root/dev/$name" # no right to make device files here: borrow the machine's
    mount --bind "/dev/$name" "$root/dev/$name"
done
[ -e "$root/dev/kvm" ] && chmod 666 "$root/dev/kvm"
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"
ln -s fd/2 "$root/dev/stderr"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs -o mode=1777,size=128m shm "$root/dev/shm"
mount -t tmpfs -o mode=755,size=64m run "$root/run"
mount -t tmpfs -o mode=1777,size=1g tmp "$root/tmp"
if [ -n "$LAB_REACH" ]; then # mutants/reach.py
    mkdir -p "$root$LAB_REACH"
    mount --bind "$LAB_REACH" "$root$LAB_REACH"
fi
mkdir -p "$root"/run/{sshd,lock,one,libvirt}
chmod 1777 "$root/run/lock"

cd "$root"
pivot_root . .old
umount -l /.old
rmdir /.old
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root USER=root
cd /
chown oneadmin: /run/one

echo "$pid"
read -r _ || exit 1
ip link set lo up
ip addr add "$LAB_ADDRESS/24" brd + dev eth0 # without a broadcast address multicast tools wait for ever
ip link set eth0 up
ip route add default dev eth0

exec 3>&1 </dev/null >>/var/log/node.log 2>&1
# -r: it does not start itself anew for each connection, which would be half of what one costs.
/usr/sbin/sshd -r -f /etc/ssh/sshd_lab 3>&-
case $LAB_NAME in
fe* | ceph) ;;
*) LD_PRELOAD=$LAB_SHAREDFS /usr/sbin/libvirtd -d 3>&- ;;
esac
until [ -e /run/sshd.pid ]; do sleep 0.01; done
echo ready >&3
exec 3>&-
while :; do
    sleep 86400 &
    wait $!
done
