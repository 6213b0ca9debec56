# SPDX-License-Identifier: Apache-2.0
"""Keep in the checkout's build/lab what is slow to find out and safe to keep: the KVM probe, programs, byte
code, kernel, capabilities.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
CACHE = Path(os.environ.get("SEMISHARED_LAB_CACHE", CHECKOUT / "build/lab"))
PARTS = ("tm", "datastore", "vmm", "etc", "lib", "bin", "im", "install.sh")
"""Of the checkout: what gets installed."""
KVM_SECONDS = 8
EMULATORS = ("/usr/bin/qemu-system-x86_64", "/usr/bin/qemu-kvm-one")
"""libvirt's own and OpenNebula's, which it does not know for the same: by path each has capabilities of its
own.
"""
LZ4 = b"\x02\x21\x4c\x18"
ASKED_ONE_BY_ONE = re.compile(r"^\s*<flag name='cpu-unavailable-features'/>\n", re.MULTILINE)
"""With it libvirt asks each QEMU that starts for some 350 properties of its processor, one by one, and QEMU
reads what it is told a byte at a time: 0.25 s of processor for each guest. Without it libvirt asks once, as
with older QEMUs. Nothing here is about CPUs.
"""


def newest_kernel() -> Path:
    """Return Debian's newest installed cloud kernel."""
    kernels = sorted(Path("/boot").glob("vmlinuz-*-cloud-amd64"), key=lambda path: path.stat().st_mtime)
    if not kernels:
        raise RuntimeError("no linux-image-cloud-amd64 on this machine: run tests/lab/provision.sh")
    return kernels[-1]


def unpacked_kernel() -> Path:
    """Return that kernel as the ELF file which is packed in it, and which QEMU starts too (PVH): guests need
    not unpack it.

    The kernel itself where it is not packed by lz4, as Debian packs this one.
    """
    kernel = newest_kernel()
    kept = CACHE / f"{kernel.name}-{kernel.stat().st_mtime_ns}.elf"
    if not kept.exists():
        data = kernel.read_bytes()
        # The x86 boot protocol, 2.08 and newer: where the payload is, and how long; its last four bytes are
        # its size unpacked.
        offset, length = struct.unpack_from("<II", data, 0x248)
        start = (data[0x1F1] + 1) * 512 + offset
        if not data.startswith(LZ4, start):
            return kernel
        put(
            kept,
            subprocess.run(
                ["lz4", "-dc"], input=data[start : start + length - 4], stdout=subprocess.PIPE, check=True
            ).stdout,
        )
    return kept


def put(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a cache file in one step, so that a reader or a parallel writer never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as out:
        out.write(data)
    os.chmod(name, mode)
    os.replace(name, path)


def build(sources: Sequence[Path], options: Sequence[str], included: Sequence[Path] = ()) -> Path:
    """Compile a C program or library and return it, kept by content under the name of its first source.

    `included`: what the sources and options name and gcc finds by itself.
    """
    key = hashlib.sha256(repr(options).encode())
    for source in (*sources, *included):
        key.update(source.read_bytes())
    result = CACHE / f"{sources[0].stem}-{key.hexdigest()[:16]}"
    if not result.exists():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            subprocess.run(["gcc", "-O2", "-Wall", *options, "-o", str(out), *map(str, sources)], check=True)
            put(result, out.read_bytes(), 0o755)
    return result


def kvm_works() -> bool:
    """Tell whether a kernel really boots under KVM; the device file alone proves nothing (it may hang)."""
    if not os.path.exists("/dev/kvm") or os.environ.get("SEMISHARED_LAB_KVM") == "no":
        return False
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    answer = CACHE / f"kvm-{boot}"
    if answer.exists():
        return answer.read_text() == "yes"
    # With no root file system the kernel panics within a second or two, and with panic=-1 that ends QEMU.
    words = [
        "qemu-system-x86_64",
        "-accel",
        "kvm",
        "-m",
        "128",
        "-nodefaults",
        "-display",
        "none",
        "-no-reboot",
    ]
    words += ["-serial", "stdio", "-kernel", str(newest_kernel()), "-append", "console=ttyS0 quiet panic=-1"]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=KVM_SECONDS, check=False
        )
        works = done.returncode == 0 and b"Kernel panic" in done.stdout
    except subprocess.TimeoutExpired:
        works = False
    put(answer, b"yes" if works else b"no")
    return works


def _content(places: Sequence[Path]) -> str:
    """Return a hash of the files in these places, and of the python that compiles them."""
    key = hashlib.sha256(sys.version.encode())
    for place in places:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file() and path.parent.name != "__pycache__":
                key.update(
                    f"{path.relative_to(CHECKOUT)} {path.stat().st_mode:o} ".encode() + path.read_bytes()
                )
    return key.hexdigest()[:16]


def package() -> Path:
    """Return where the package is kept as install.sh leaves it, with its byte code: by the content of what it
    is made of.
    """
    return CACHE / f"package-{_content([CHECKOUT / folder for folder in ('bin', 'lib')])}"


@cache
def installed() -> Path:
    """Return where is kept what an installation leaves, by content: `0` the checkout, `1` the front-end's
    remotes, `2` a host's.
    """
    return CACHE / f"installed-{_content([CHECKOUT / part for part in PARTS] + [HERE / 'stock'])}"


def keep_package(kept: Path, installed: Path) -> None:
    """Keep what an installation has just made."""
    _keep(kept, {"": installed})


def keep_installed(kept: Path, trees: Sequence[Path]) -> None:
    """Keep what an installation has just made everywhere."""
    _keep(kept, {str(number): tree for number, tree in enumerate(trees)})


def _keep(kept: Path, trees: dict[str, Path]) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=CACHE))
    if "" not in trees:
        (new / "all").mkdir()
    for name, tree in trees.items():
        subprocess.run(["cp", "-a", "--", str(tree), str(new / "all" / name)], check=True)
    try:
        (new / "all").rename(kept)
    except OSError:
        pass  # another lab was faster
    shutil.rmtree(new)


def _capabilities(root: Path) -> Path:
    parts = [os.uname().release, ASKED_ONE_BY_ONE.pattern]
    for program in (*EMULATORS, "/usr/sbin/libvirtd"):
        parts.append(f"{program} {os.stat(f'{root}{program}').st_ctime_ns}")
    return CACHE / ("capabilities-" + hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16])


def capabilities(root: Path = Path("/")) -> Path | None:
    """Return libvirt's kept QEMU capabilities of a root; libvirt itself checks again that they still fit."""
    folder = _capabilities(root)
    return folder if folder.exists() else None


def keep_capabilities(folder: Path, root: Path) -> None:
    """Keep the capabilities a libvirtd of a root has just found out."""
    CACHE.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=CACHE))
    shutil.copytree(folder, new / "capabilities", ignore=shutil.ignore_patterns("*.lock"))
    for path in (new / "capabilities").iterdir():
        path.write_text(ASKED_ONE_BY_ONE.sub("", path.read_text()))
    try:
        (new / "capabilities").rename(_capabilities(root))
    except OSError:
        pass  # another lab was faster
    shutil.rmtree(new)
