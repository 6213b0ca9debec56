# SPDX-License-Identifier: Apache-2.0
"""qemu-img, one function per subcommand, always with an explicit format (without: CVE-2026-24708)."""

from __future__ import annotations

import json
import os
from typing import Any, Callable, Sequence

from ..errors import NotSupported, ToolFailed
from ..units import MiB, mib_ceil
from .run import run, work

FOREIGN = ["env", "MALLOC_ARENA_MAX=1", "prlimit", f"--stack={1 << 20}", f"--as={1 << 30}"]
"""Limits for images that strangers have made: tables may be as large as their headers say (OpenStack has the
same limit).

The limit is to meet those tables: each of QEMU's threads, 64 on a busy machine, would reserve 64 MiB for
malloc and 8 MiB of stack.
"""
INFO_CPU = "--cpu=30"
"""Seconds; reading a header takes none. A conversion may take as long as the image is large."""


LONGEST_BACKING = 1023
"""Bytes of a backing name (docs/interop/qcow2.txt of QEMU)."""


def info(path: str, format: str, *, foreign: bool = False) -> dict[str, object]:
    """Return what `qemu-img info` says of `path`, opened as `format`; works on images in use."""
    limits = [*FOREIGN, INFO_CPU, "--"] if foreign else []
    text = run([*limits, "qemu-img", "info", "--force-share", "--output=json", "-f", format, path])
    try:
        data = json.loads(text)
    except ValueError:
        raise ToolFailed(f"qemu-img info {path}: answer is not JSON") from None
    return data if isinstance(data, dict) else {}


def virtual_size(path: str, format: str, *, foreign: bool = False) -> int:
    """Return the size in bytes that a guest sees."""
    size = info(path, format, foreign=foreign).get("virtual-size")
    if not isinstance(size, int):
        raise ToolFailed(f"qemu-img info {path}: no virtual size")
    return size


def create(path: str, format: str, size: int) -> None:
    """Create an empty image of `size` bytes."""
    work(["qemu-img", "create", "-q", "-f", format, path, str(size)])


def create_overlay(
    path: str, backing: str, backing_format: str, size: int, options: str, *, look: bool = True
) -> None:
    """Create a qcow2 overlay over `backing`; `size` in bytes, 0 for that of the backing image.

    Without `look` only the name goes into the header, and nobody opens what it leads to.
    """
    if len(os.fsencode(backing)) > LONGEST_BACKING:
        raise NotSupported(
            f"{backing} has more than {LONGEST_BACKING} bytes, and in a qcow2 file there is no "
            f"room for the name of more"
        )
    argv = [
        "qemu-img",
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        backing_format,
        "-b",
        backing,
        *([] if look else ["-u"]),
    ]
    if options:
        argv += ["-o", options]
    work([*argv, path, *([str(size)] if size else [])])
    _set_length(path)


def _set_length(path: str) -> None:
    """Give a new overlay's file the length it could grow to, as a hole.

    A guest's first writes then fill a hole instead of extending the file, which the host's file system does
    one at a time (docs/explanation/overlay-options.md: 0.5 of raw without, 0.7 to 0.8 with). The slack is for
    QEMU's tables.
    """
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(32)[24:32], "big")
        try:
            os.ftruncate(file.fileno(), size + size // 1024 + (2 << 20))
        except OSError:
            # Larger than this file system's files can be: the overlay grows as it is written.
            pass


def chain(layers: Sequence[str], base: str, base_format: str) -> str:
    """Return a `json:` name for qcow2 `layers`, the lowest first, over `base`: what their headers name is not
    asked.
    """
    node: dict[str, object] = {"driver": base_format, "file": {"driver": "file", "filename": base}}
    if base_format == "qcow2":
        node["backing"] = None
    for layer in layers:
        node = {"driver": "qcow2", "file": {"driver": "file", "filename": layer}, "backing": node}
    return f"json:{json.dumps(node)}"


MAPPED = ("start", "length", "depth", "zero", "data")
"""What every QEMU that we work with says of a range in a map."""


def mapped(source: str) -> list[dict[str, Any]]:
    """Return which file of the chain `source` (a `json:` name) holds what: MAPPED, and where it is so present
    and offset.
    """
    try:
        found = json.loads(work(["qemu-img", "map", "--output=json", source]))
    except ValueError:
        found = None
    if not isinstance(found, list) or any(
        not isinstance(entry, dict) or any(key not in entry for key in MAPPED) for entry in found
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
) -> None:
    """Write an independent sparse copy of `source`, with all of its backing chain, to the new file `target`.

    `rate`: bytes per second, 0 for no limit. `direct`: past the page cache, where the file system of `target`
    can do that.
    """
    shared, limits = ["--force-share"] if share else [], [*FOREIGN, "--"] if foreign else []
    pace, how = ["-r", str(rate)] if rate else [], _past_the_cache(target) if direct else []
    work(
        [
            *limits,
            "qemu-img",
            "convert",
            *shared,
            *pace,
            *how,
            *_format(source, source_format),
            "-O",
            target_format,
            source,
            target,
        ]
    )


def convert_over(source: str, source_format: str, target: str, backing: str, backing_format: str) -> None:
    """Write the content of the standalone image `source` to the new qcow2 `target` over `backing`, zeros and
    all: of that nothing shows.
    """
    over = ["-B", backing, "-F", backing_format, *_past_the_cache(target)]
    work(["qemu-img", "convert", "-f", source_format, "-O", "qcow2", *over, source, target])


def _past_the_cache(target: str) -> list[str]:
    """Return how qemu-img is told to write past the page cache, if a new file beside `target` could be
    written so.

    What it leaves there the kernel writes out when it likes, in nobody's class of I/O.
    """
    try:
        os.close(os.open(os.path.dirname(target), os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError:
        return []
    return ["-t", "none"]


def measure(source: str, format: str) -> int:
    """Return how many bytes a standalone qcow2 copy of `source` will take at most; works on images in use."""
    text = run(
        [
            "qemu-img",
            "measure",
            "--force-share",
            "--output=json",
            *_format(source, format),
            "-O",
            "qcow2",
            source,
        ]
    )
    try:
        return int(json.loads(text)["required"])
    except (ValueError, KeyError, TypeError):
        raise ToolFailed(f"qemu-img measure {source}: answer is not understood") from None


def _format(source: str, format: str) -> list[str]:
    """Return how qemu-img is told the format of `source`: a `json:` name says it itself."""
    return [] if source.startswith("json:") else ["-f", format]


def rbd_name(source: str, user: str, conf: str) -> str:
    """Return what QEMU calls the RBD image `source` (POOL/IMAGE) opened as `user`, with limits on what Ceph
    may take.
    """
    options = ["client_mount_timeout=10", "rados_mon_op_timeout=30", "rados_osd_op_timeout=30"]
    return ":".join([f"rbd:{source}", f"id={user}", *([f"conf={conf}"] if conf else []), *options])


def fill(source: str, source_format: str, target: str, *, share: bool = False) -> None:
    """Write the content of `source`, with all of its backing chain, to the raw image `target`, which is there
    and empty.
    """
    argv = [
        "qemu-img",
        "convert",
        "-n",
        "--target-is-zero",
        "-W",
        "-m",
        "8",
        *(["--force-share"] if share else []),
    ]
    work([*argv, *_format(source, source_format), "-O", "raw", source, target])


def grow(path: str, format: str, size: int) -> None:
    """Grow an image to `size` bytes, unless it is that large in whole MiB; what it lies over need not be
    there.
    """
    if not size or mib_ceil(virtual_size(path, format)) * MiB >= size:
        return
    node: dict[str, object] = {"driver": format, "file": {"driver": "file", "filename": path}}
    if format == "qcow2":
        node["backing"] = None
    work(["qemu-img", "resize", "-q", f"json:{json.dumps(node)}", str(size)])


def commit(path: str) -> None:
    """Write what the qcow2 `path` holds into what it lies over; it stays as it is, to be committed again if
    that is cut short.
    """
    work(["qemu-img", "commit", "-q", "-d", *_format(path, "qcow2"), path])


def rebase(path: str, backing: str, backing_format: str) -> None:
    """Copy into the qcow2 `path` what it has from below itself, but not from `backing` ('' for none); lay it
    over that.
    """
    argv = ["qemu-img", "rebase", "-q", *_format(path, "qcow2"), "-b", backing]
    work([*argv, *(["-F", backing_format] if backing else []), path])


def lay_over(path: str, backing: str, backing_format: str) -> None:
    """Let the header of the qcow2 `path` name `backing` as what it lies over; nothing else of it changes."""
    work(["qemu-img", "rebase", "-u", "-q", "-f", "qcow2", "-b", backing, "-F", backing_format, path])


def rebased(
    path: str, target: str, backing: str, backing_format: str, named: Callable[[str], str] = str
) -> None:
    """Write the new file `target`, beside `path` and with its content, as `rebase` would make it; `path`
    stays as it is.

    `named` returns what qemu-img is to be told for a file. Not by `convert -B`: that takes what `path` itself
    holds, and leaves out what lies between it and `backing`.
    """
    work(["cp", "--sparse=always", "--reflink=auto", "--", path, target])
    rebase(named(target), backing, backing_format)


def resize(path: str, format: str, size: int) -> None:
    """Grow an image to `size` bytes."""
    work(["qemu-img", "resize", "-q", "-f", format, path, str(size)])
