# SPDX-License-Identifier: Apache-2.0
"""qemu-img, one function per subcommand, always with an explicit format (without: CVE-2026-24708).

Also new images, empty, or with a file system or a swap area.
"""

from __future__ import annotations

import json
import os
from typing import Any, Callable, Sequence

from ..errors import NotSupported, ToolFailed
from ..units import MiB, mib_ceil
from . import files
from .run import run, work

FOREIGN = ["env", "MALLOC_ARENA_MAX=1", "prlimit", f"--stack={1 << 20}", f"--as={1 << 30}"]
"""Limits for images from untrusted makers, whose headers may ask for tables of any size (as OpenStack's).

MALLOC_ARENA_MAX and the stack size keep QEMU's threads, up to 64, within the limit: each would reserve 64 MiB
for malloc and 8 MiB of stack.
"""
INFO_CPU = "--cpu=30"
"""CPU seconds; reading a header takes none. A conversion has no such limit."""
LONGEST_BACKING = 1023
"""Bytes of a backing name (QEMU's docs/interop/qcow2.txt)."""
MKFS = {
    "ext2": ["mkfs.ext2", "-q", "-F"],
    "ext3": ["mkfs.ext3", "-q", "-F"],
    "ext4": ["mkfs.ext4", "-q", "-F"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
    "swap": ["mkswap", "-L", "swap"],
}
"""A swap area has the label that OpenNebula's own drivers give it: guests' fstab may name it by that."""


def info(path: str, format: str, *, foreign: bool = False) -> dict[str, object]:
    """Return the answer of `qemu-img info`; works on images in use."""
    limits = [*FOREIGN, INFO_CPU, "--"] if foreign else []
    argv = [*limits, "qemu-img", "info", "--force-share", "--output=json", *_format(path, format)]
    text = run([*argv, path])
    try:
        data = json.loads(text)
    except ValueError:
        raise ToolFailed(f"qemu-img info {path}: answer is not JSON") from None
    return data if isinstance(data, dict) else {}


def whole_disk(path: str, format: str) -> str:
    """Return the name by which QEMU reads all of a foreign image.

    For VHDs of some programs (VirtualBox, Virtual PC) it goes by the geometry, which is up to 2 MiB less.
    """
    if format != "vpc":
        return path
    file = {"driver": "file", "filename": path}
    return "json:" + json.dumps({"driver": "vpc", "force_size_calc": "current_size", "file": file})


def virtual_size(path: str, format: str, *, foreign: bool = False) -> int:
    """Return the virtual size in bytes."""
    size = info(path, format, foreign=foreign).get("virtual-size")
    if not isinstance(size, int):
        raise ToolFailed(f"qemu-img info {path}: no virtual size")
    return size


def create(path: str, format: str, size: int) -> None:
    work(["qemu-img", "create", "-q", "-f", format, path, str(size)])


def make_empty(
    path: str, format: str, size: int, fs: str, directory: str = "", options: Sequence[str] = ()
) -> None:
    """Create an empty image at `path` of `size` bytes, holding file system `fs` unless that is ''.

    Temporary files lie in `directory`, else beside the image. `options` are words for mkfs.
    """
    if not fs:
        create(path, format, size)
        return
    raw = path if format == "raw" else files.staged_name(f"{directory or os.path.dirname(path)}/raw")
    try:
        create(raw, "raw", size)
        work([*MKFS[fs], *options, raw])
        if raw != path:
            convert(raw, "raw", path, format)
    finally:
        if raw != path:
            files.unlink(raw)


def create_overlay(
    path: str, backing: str, backing_format: str, size: int, options: str, *, look: bool = True
) -> None:
    """Create a qcow2 overlay over `backing`; `size` in bytes, 0 for that of the backing image.

    Without `look` qemu-img writes the name into the header and does not open the backing file.
    """
    if len(os.fsencode(backing)) > LONGEST_BACKING:
        raise NotSupported(
            f"{backing} has more than {LONGEST_BACKING} bytes, and in a qcow2 file there is no "
            f"room for the name of more"
        )
    how = [*([] if look else ["-u"]), *(["-o", options] if options else [])]
    over = ["-f", "qcow2", "-F", backing_format, "-b", backing, *how]
    work(["qemu-img", "create", "-q", *over, path, *([str(size)] if size else [])])
    _set_length(path)


def file_length(size: int) -> int:
    """Return the bytes that the file of a qcow2 image of `size` bytes may have, with QEMU's tables."""
    return size + size // 1024 + (2 << 20)


def _set_length(path: str) -> None:
    """Give a new overlay's file the length it could grow to, as a hole.

    A guest's first writes then fill a hole instead of extending the file, which the host's file system does
    one at a time (docs/explanation/overlay-options.md: 0.5 of raw without, 0.7 to 0.8 with).
    """
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(32)[24:32], "big")
        try:
            os.ftruncate(file.fileno(), file_length(size))
        except OSError:
            # Beyond the file system's limit: the overlay grows with its writes.
            pass


def _alone(path: str, format: str) -> dict[str, object]:
    """Return QEMU's description of an image that is opened without its backing file."""
    node: dict[str, object] = {"driver": format, "file": {"driver": "file", "filename": path}}
    return {**node, "backing": None} if format == "qcow2" else node


def chain(layers: Sequence[str], base: str, base_format: str) -> str:
    """Return a `json:` name for qcow2 `layers`, the lowest first, over `base`, which overrides headers."""
    node = _alone(base, base_format)
    for layer in layers:
        node = {"driver": "qcow2", "file": {"driver": "file", "filename": layer}, "backing": node}
    return f"json:{json.dumps(node)}"


MAPPED = ("start", "length", "depth", "zero", "data")
"""Keys of a map's entry that every supported QEMU writes."""


def mapped(source: str) -> list[dict[str, Any]]:
    """Return the map of the chain `source` (a `json:` name): MAPPED, `present` and `offset` where known."""
    try:
        found = json.loads(work(["qemu-img", "map", "--output=json", source]))
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(
        isinstance(entry, dict) and entry.keys() >= set(MAPPED) for entry in found
    ):
        raise ToolFailed(f"qemu-img map {source}: answer is not understood, is QEMU older than 5.2?")
    return found


def convert(
    source: str,
    source_format: str,
    target: str,
    target_format: str,
    *,
    share: bool = False,
    foreign: bool = False,
    rate: int = 0,
    direct: bool = False,
    within: Sequence[str] = (),
) -> None:
    """Write an independent sparse copy of `source`, with all of its backing chain, to the new file `target`.

    `rate`: bytes per second, 0 for no limit. `direct`: without the page cache, where the file system of
    `target` supports that. `within`: words of programs that start it (rate_limit.priority).
    """
    shared, limits = ["--force-share"] if share else [], [*FOREIGN, "--"] if foreign else []
    how = [*_pace(rate), *(past_the_cache(target) if direct else [])]
    argv = [*within, *limits, "qemu-img", "convert", *shared, *how, *_format(source, source_format)]
    work([*argv, "-O", target_format, source, target])


def convert_over(source: str, source_format: str, target: str, backing: str, backing_format: str) -> None:
    """Write all of the image `source`, zeros too, to the new qcow2 `target` over `backing`."""
    # Of `convert`, QEMU 5.2 has no -F.
    over = ["-B", backing, "-o", f"backing_fmt={backing_format}", *past_the_cache(target)]
    work(["qemu-img", "convert", "-f", source_format, "-O", "qcow2", *over, source, target])


def _pace(rate: int) -> list[str]:
    return ["-r", str(rate)] if rate else []


def past_the_cache(target: str) -> list[str]:
    """Return qemu-img's options for direct writes, [] if the file system of `target` refuses them.

    The kernel's own write-back of the page cache belongs to no I/O class.
    """
    try:
        os.close(os.open(os.path.dirname(target), os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError:
        return []
    return ["-t", "none"]


def measure(source: str, format: str) -> int:
    """Return the most bytes that a standalone qcow2 copy of `source` will take; works on images in use."""
    argv = ["qemu-img", "measure", "--force-share", "--output=json", *_format(source, format)]
    text = run([*argv, "-O", "qcow2", source])
    try:
        return int(json.loads(text)["required"])
    except (ValueError, KeyError, TypeError):
        raise ToolFailed(f"qemu-img measure {source}: answer is not understood") from None


def _format(source: str, format: str) -> list[str]:
    """Return qemu-img's option for the format of `source`; a `json:` name includes it."""
    return [] if source.startswith("json:") else ["-f", format]


def rbd_name(source: str, user: str, conf: str) -> str:
    """Return QEMU's name of the RBD image `source` (POOL/IMAGE), opened as `user`, with Ceph time limits."""
    options = ["client_mount_timeout=10", "rados_mon_op_timeout=30", "rados_osd_op_timeout=30"]
    return ":".join([f"rbd:{source}", f"id={user}", *([f"conf={conf}"] if conf else []), *options])


def fill(source: str, source_format: str, target: str, *, share: bool = False) -> None:
    """Write the content of `source`, with all of its backing chain, to the empty raw image `target`."""
    how = ["-n", "--target-is-zero", "-W", "-m", "8", *(["--force-share"] if share else [])]
    work(["qemu-img", "convert", *how, *_format(source, source_format), "-O", "raw", source, target])


def grow(path: str, format: str, size: int) -> None:
    """Grow an image to `size` bytes, unless it has as many whole MiB; its backing file need not exist."""
    if not size or mib_ceil(virtual_size(path, format)) * MiB >= size:
        return
    work(["qemu-img", "resize", "-q", f"json:{json.dumps(_alone(path, format))}", str(size)])


def convert_whole(
    source: str, source_format: str, target: str, within: Sequence[str] = (), *, rate: int = 0
) -> None:
    """Write all of an image, zeros too, to the empty qcow2 file `target` of its size, which has no backing.

    Laid over another image of this size later, it hides all of that. QEMU leaves zeros out where a target has
    them: so it opens this one over a source of data without end. `rate`, `within` as for `convert`.
    """
    over = f"backing.driver=null-co,backing.size={virtual_size(target, 'qcow2')}"
    named = "driver=qcow2,file.driver=file,file.filename=" + target.replace(",", ",,")
    how = ["-n", *_pace(rate), *past_the_cache(target), *_format(source, source_format)]
    work([*within, "qemu-img", "convert", *how, "--target-image-opts", source, f"{named},{over}"])


def add_bitmap(path: str, name: str) -> None:
    """Add a persistent bitmap to the qcow2 `path`, in which QEMU marks all that is written from now on."""
    run(["qemu-img", "bitmap", "--add", "-f", "qcow2", path, name])


def remove_bitmap(path: str, name: str) -> None:
    run(["qemu-img", "bitmap", "--remove", "-f", "qcow2", path, name])


def commit(path: str) -> None:
    """Commit the qcow2 `path` to its backing file; `path` keeps its data, for a repetition after a crash."""
    work(["qemu-img", "commit", "-q", "-d", *_format(path, "qcow2"), path])


def rebase(path: str, backing: str, backing_format: str) -> None:
    """Rebase the qcow2 `path` to `backing` ('' for none); qemu-img copies the data that is missing there."""
    argv = ["qemu-img", "rebase", "-q", *_format(path, "qcow2"), "-b", backing]
    work([*argv, *(["-F", backing_format] if backing else []), path])


def lay_over(path: str, backing: str, backing_format: str) -> None:
    """Set the backing file in the header of the qcow2 `path`; nothing else changes."""
    work(["qemu-img", "rebase", "-u", "-q", "-f", "qcow2", "-b", backing, "-F", backing_format, path])


def rebased(
    path: str,
    target: str,
    backing: str,
    backing_format: str,
    named: Callable[[str], str] = str,
    over: tuple[str, str] | None = None,
) -> None:
    """Write the new file `target` beside `path`: a copy of it, rebased to `backing`; `path` stays as it is.

    `named` returns the name of a file for qemu-img; `over`: path and format of what is read in the place of
    what `path` lies over. `convert -B` would not do: it omits the layers between
    `path` and `backing`.
    """
    work(["cp", "--sparse=always", "--reflink=auto", "--", path, target])
    if over:
        lay_over(target, *over)
    rebase(named(target), backing, backing_format)


def resize(path: str, format: str, size: int) -> None:
    work(["qemu-img", "resize", "-q", "-f", format, path, str(size)])
