# SPDX-License-Identifier: Apache-2.0
"""Build the lab guests' disk image: raw, bootable through the BIOS, Debian's cloud kernel and a busybox initramfs.

The image is one FAT file system without a partition table, made by mtools and syslinux without mounting anything.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from lab import caches, initramfs
from lab.initramfs import BUSYBOX

HERE = Path(__file__).resolve().parent
MIB = 32
# What they need comes by itself. The cloud kernel has no AHCI: see context.c.
MODULES = ["virtio_pci", "virtio_blk", "virtio_scsi", "sd_mod", "ata_piix", "sr_mod", "evdev", "button", "efivarfs", "virtiofs"]
# All that is left out is a fifth of what a boot takes of an emulated processor: security modules, certificates, patches of the kernel.
# no_timer_check: an emulated timer that a busy machine lets wait is not a broken one, for which Linux would panic.
COMMAND_LINE = (
    "console=ttyS0 quiet loglevel=0 panic=1 mitigations=off nokaslr no_timer_check random.trust_cpu=on tsc=reliable"
    " cryptomgr.notests audit=0 init_on_alloc=0 noreplace-smp lsm= apparmor=0"
    " initcall_blacklist=load_system_certificate_list,load_revocation_certificate_list"
)
BOOT = f"""\
DEFAULT lab
PROMPT 0
TIMEOUT 0
LABEL lab
  KERNEL vmlinuz
  INITRD initrd
  APPEND {COMMAND_LINE}
"""
# Larger clusters for the loader, no tests of the kernel by itself: less for an emulated processor to do.
CLUSTER = 8
"""Sectors."""


def _initramfs(tree: Path, modules: list[Path]) -> bytes:
    (tree / "bin").mkdir(parents=True)
    (tree / "modules").mkdir()
    shutil.copy(BUSYBOX, tree / "bin/busybox")
    shutil.copy(caches.build([HERE / "agent.c", HERE / "context.c"], ["-static", f"-I{HERE}"]), tree / "bin/agent")
    shutil.copy(HERE / "init.sh", tree / "init")
    os.chmod(tree / "init", 0o755)
    initramfs.put(modules, tree / "modules")
    return initramfs.pack(tree)


def _key(kernel: Path, modules: list[Path]) -> str:
    digest = hashlib.sha256(f"{MIB} {CLUSTER} {BOOT} {MODULES} {kernel.stat().st_mtime_ns}".encode())
    for path in [Path(__file__), HERE / "agent.c", HERE / "context.c", HERE / "init.sh", Path(initramfs.__file__), BUSYBOX, *modules]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _kept() -> tuple[Path, Path, str]:
    """Return the kernel, where its initramfs is kept, and under which key."""
    kernel = caches.newest_kernel()
    modules = initramfs.modules(kernel.name[len("vmlinuz-") :], MODULES)
    key = _key(kernel, modules)
    kept = caches.CACHE / f"guest-{key}.initrd"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as name:
            caches.put(kept, _initramfs(Path(name) / "tree", modules))
    return kernel, kept, key


def lay_out_boot(folder: Path) -> None:
    """Put what a guest boots from without its disk into `folder`: `vmlinux` and `initrd`."""
    for source, name in ((caches.unpacked_kernel(), "vmlinux"), (_kept()[1], "initrd")):
        subprocess.run(["cp", "--reflink=auto", str(source), str(folder / name)], check=True)


def build_guest_image(dest: Path) -> Path:
    """Write the guest's disk image to `dest`; built once per content and kept in the checkout's build directory."""
    kernel, packed, key = _kept()
    kept = caches.CACHE / f"guest-{key}.raw"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "initrd").write_bytes(gzip.compress(packed.read_bytes(), 6))  # there the BIOS reads it
            (folder / "syslinux.cfg").write_text(BOOT)
            image = folder / "image"
            sectors = str(MIB * 2048)
            tools = [
                ["mformat", "-C", "-i", str(image), "-T", sectors, "-h", "64", "-s", "32", "-c", str(CLUSTER), "-v", "LABGUEST", "::"],
                ["mcopy", "-i", str(image), str(kernel), "::vmlinuz"],
                ["mcopy", "-i", str(image), str(folder / "initrd"), str(folder / "syslinux.cfg"), "::"],
                ["syslinux", "--install", str(image)],
            ]
            for words in tools:
                subprocess.run(words, check=True, capture_output=True, env={**os.environ, "MTOOLS_SKIP_CHECK": "1"})
            caches.put(kept, image.read_bytes())
    dest.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "--sparse=always", "--reflink=auto", str(kept), str(dest)], check=True)
    return dest
