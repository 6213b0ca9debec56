# SPDX-License-Identifier: Apache-2.0
"""A guest with QEMU's own guest agent, on Debian's kernel: it writes to a file system of its own, and writes
nothing out by itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from lab import caches, initramfs
from lab.initramfs import BUSYBOX

AGENT = "/usr/sbin/qemu-ga"
MODULES = ["virtio_pci", "virtio_blk", "virtio_console"]
MARK = b"written by the guest, and by nobody written out"
INIT = f"""#!/bin/busybox sh
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev /mnt /run /var/run /tmp /etc
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
while read -r name; do insmod "/modules/$name.ko"; done </modules/order 2>/dev/null
ln -s /proc/mounts /etc/mtab
# Dirty pages stay where they are, until somebody asks for them.
echo 0 >/proc/sys/vm/dirty_writeback_centisecs
mke2fs -q /dev/vda >/dev/null 2>&1
mount -t ext4 /dev/vda /mnt || mount -t ext2 /dev/vda /mnt || echo no file system
for port in /sys/class/virtio-ports/*; do agent=/dev/$(basename "$port"); done
sync
echo "{MARK.decode()}" >/mnt/mark
qemu-ga -m virtio-serial -p "$agent" -t /run &
echo "up"
number=0
# Stops where the file system is frozen.
while echo "$number" >/mnt/count; do
    echo "alive $number"
    number=$((number + 1))
    sleep 0.1
done
"""
DEVICES = (
    "<channel type='unix'><source mode='bind'/><target type='virtio' "
    "name='org.qemu.guest_agent.0'/></channel>"
    "<serial type='file'><source path='/var/tmp/guest.log'/><target port='0'/></serial>"
)
COMMAND_LINE = f"console=ttyS0 quiet loglevel=0 panic=1 audit=0 {initramfs.QUICK}"


def build() -> tuple[Path, Path]:
    """Return kernel and initramfs; that is made once per content and kept."""
    kernel = caches.newest_kernel()
    modules = initramfs.modules(kernel.name[len("vmlinuz-") :], MODULES)
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        for folder in ("bin", "modules"):
            (tree / folder).mkdir(parents=True)
        shutil.copy(BUSYBOX, tree / "bin/busybox")
        said = subprocess.run(["ldd", AGENT], check=True, capture_output=True, text=True).stdout
        for path in (AGENT, *re.findall(r"(/\S+) \(0x", said)):
            target = tree / ("bin/qemu-ga" if path == AGENT else path.lstrip("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(path), target)
        initramfs.put(modules, tree / "modules")
        (tree / "init").write_text(INIT)
        (tree / "init").chmod(0o755)
        packed = Path(name) / "initrd"
        packed.write_bytes(initramfs.pack(tree))
        kept = caches.CACHE / "guest-with-agent.initrd"
        caches.put(kept, packed.read_bytes())
    return caches.unpacked_kernel(), kept
