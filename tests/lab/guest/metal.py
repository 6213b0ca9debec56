# SPDX-License-Identifier: Apache-2.0
"""Build a guest without an operating system (metal/main.c): its kernel, and a disk image that boots it
through the BIOS.

The image is as large as that of linux.py, and holds as much that is no zero and cannot be compressed, so that
to copy it proves and costs the same.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
from pathlib import Path

from lab import caches
from lab.guest.linux import CONTENT_MIB, MIB

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "metal"
NAMES = ("main.c", "machine.c", "virtio.c", "atapi.c", "loops.c", "string.c", "entry.S")
SHARED = ("content.h", "sha256.h")
PARTS = 3
"""Of 16 KiB, that boot.S reads."""
LINK = ["-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none"]
FREESTANDING = [
    "-Wextra",
    "-ffreestanding",
    "-fno-pic",
    "-fno-stack-protector",
    "-fcf-protection=none",
    "-mno-red-zone",
    "-mgeneral-regs-only",
    "-fno-asynchronous-unwind-tables",
    "-fno-tree-loop-distribute-patterns",
    *LINK,
    "-Wl,-z,max-page-size=4096",
    "-Wl,--no-warn-rwx-segments",
]


def kernel() -> Path:
    """Return the kernel, an ELF file that QEMU starts by PVH."""
    script = FOLDER / "link.ld"
    headers = [*sorted(FOLDER.glob("*.h")), *(HERE / name for name in SHARED)]
    return caches.build(
        [FOLDER / name for name in NAMES], [*FREESTANDING, f"-Wl,-T,{script}"], [script, *headers]
    )


def boot_files() -> dict[str, Path]:
    """Return what a guest boots from without its disk: `metal`."""
    return {"metal": kernel()}


def _boot_sector() -> bytes:
    options = [f"-DPARTS={PARTS}", *LINK, "-Wl,-Ttext=0x7C00", "-Wl,--oformat=binary"]
    return caches.build([FOLDER / "boot.S"], options).read_bytes()


def disk_image() -> Path:
    """Return the disk image, raw."""
    program = kernel()
    kept = caches.CACHE / f"{program.name}-{MIB}-{CONTENT_MIB}.raw"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            flat = Path(folder) / "flat"
            subprocess.run(["objcopy", "-O", "binary", str(program), str(flat)], check=True)
            code = flat.read_bytes()
        if len(code) > PARTS * 16384:
            raise RuntimeError(
                f"the metal guest has {len(code)} bytes, and its boot sector reads {PARTS * 16384}"
            )
        begin = _boot_sector() + code
        content = begin + random.Random(1).randbytes((CONTENT_MIB << 20) - len(begin))
        caches.put(kept, content.ljust(MIB << 20, b"\0"))
    return kept
