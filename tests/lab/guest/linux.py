# SPDX-License-Identifier: Apache-2.0
"""Build the disk image of a Linux guest: raw, bootable through the BIOS, Debian's cloud kernel and a busybox
initramfs.

The image is one FAT file system without a partition table, made by mtools and syslinux without mounting
anything.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from lab import caches, initramfs
from lab.initramfs import BUSYBOX

HERE = Path(__file__).resolve().parent
MIB = 32
CONTENT_MIB = 16
"""About as much of it is no zero, and hardly to be compressed."""
# What they need comes by itself. The cloud kernel has no AHCI: see context.c. No disk of a test is one of
# SCSI: a driver for that controller, which each guest has, would look for 256 of them.
MODULES = {
    "": ["virtio_pci", "virtio_blk", "ata_piix", "sr_mod", "evdev", "button"],
    "efi": ["efivarfs"],
    "share": ["virtiofs"],
}
"""By the folder below /modules: that for every guest, and those for some (boot.c)."""
# loglevel=1: why a kernel panics, and nothing else.
COMMAND_LINE = f"console=ttyS0 quiet loglevel=1 panic=1 lsm= apparmor=0 audit=0 norandmaps {initramfs.QUICK}"
BOOT = f"""\
DEFAULT lab
PROMPT 0
TIMEOUT 0
LABEL lab
  KERNEL vmlinuz
  INITRD initrd
  APPEND {COMMAND_LINE}
"""
# Larger clusters for the loader: less for an emulated processor to do.
CLUSTER = 8
"""Sectors."""
HEADERS = ("context.h", "content.h", "sha256.h")


def _initramfs(tree: Path, modules: dict[str, list[Path]]) -> bytes:
    (tree / "bin").mkdir(parents=True)
    shutil.copy(BUSYBOX, tree / "bin/busybox")
    agent = caches.build(
        [HERE / "agent.c", HERE / "context.c"], ["-static", f"-I{HERE}"], [HERE / name for name in HEADERS]
    )
    shutil.copy(agent, tree / "bin/agent")
    shutil.copy(caches.build([HERE / "boot.c"], ["-static"]), tree / "init")
    for name, files in modules.items():
        (tree / "modules" / name).mkdir(parents=True)
        initramfs.put(files, tree / "modules" / name)
    return initramfs.pack(tree)


def _key(kernel: Path, modules: list[Path]) -> str:
    digest = hashlib.sha256(f"{MIB} {CLUSTER} {BOOT} {MODULES} {kernel.stat().st_mtime_ns}".encode())
    sources = [HERE / name for name in ("agent.c", "context.c", "boot.c", *HEADERS)]
    for path in [Path(__file__), *sources, Path(initramfs.__file__), BUSYBOX, *modules]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _kept() -> tuple[Path, Path, str]:
    """Return the kernel, where its initramfs is kept, and under which key."""
    kernel = caches.newest_kernel()
    modules: dict[str, list[Path]] = {}
    for name, wanted in MODULES.items():
        found = initramfs.modules(kernel.name[len("vmlinuz-") :], wanted)
        modules[name] = [path for path in found if name == "" or path not in modules[""]]
    key = _key(kernel, [path for files in modules.values() for path in files])
    kept = caches.CACHE / f"guest-{key}.initrd"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as name:
            caches.put(kept, _initramfs(Path(name) / "tree", modules))
    return kernel, kept, key


def boot_files() -> dict[str, Path]:
    """Return what a guest boots from without its disk: `vmlinux` and `initrd`."""
    return {"vmlinux": caches.unpacked_kernel(), "initrd": _kept()[1]}


def disk_image() -> Path:
    """Return the disk image; built once per content and kept in the checkout's build directory."""
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
                [
                    "mformat",
                    "-C",
                    "-i",
                    str(image),
                    "-T",
                    sectors,
                    "-h",
                    "64",
                    "-s",
                    "32",
                    "-c",
                    str(CLUSTER),
                    "-v",
                    "LABGUEST",
                    "::",
                ],
                ["mcopy", "-i", str(image), str(kernel), "::vmlinuz"],
                ["mcopy", "-i", str(image), str(folder / "initrd"), str(folder / "syslinux.cfg"), "::"],
                ["syslinux", "--install", str(image)],
            ]
            for words in tools:
                subprocess.run(
                    words, check=True, capture_output=True, env={**os.environ, "MTOOLS_SKIP_CHECK": "1"}
                )
            caches.put(kept, image.read_bytes())
    return kept
