# SPDX-License-Identifier: Apache-2.0
"""Snapshots of an image, or of a disk that is one: independent copies beside it.

    SOURCE           always the present content, in the image's own format, whoever asks
    SOURCE.snap/0    the content when snapshot 0 was taken, in the same format

What each crash leaves: a staged file in SOURCE.snap, removed by the next operation on the image.
"""

from __future__ import annotations

import os

from ..errors import MissingImage
from ..plan.steps import CopyBack, CopyOut, DropCopy
from . import dir_store, files, inspection, layers, qemu_img, running, stock_layout, vm_dir, writers
from .run import work
from .trace import point


def folder(source: str) -> str:
    """Return the directory of an image's snapshots."""
    return f"{source}.snap"


def numbers(source: str) -> list[int]:
    """Return the numbers of an image's snapshots."""
    return layers.numbered(folder(source))


def copy_out(step: CopyOut, planned: float) -> None:
    """Publish a snapshot of a disk in place: a copy beside the image, from the running guest if there is one."""
    record = vm_dir.record_of(step.disk)
    image = record["image"]
    assert isinstance(image, dict)
    source, format = str(image["source"]), str(record["format"])
    dir_store.check_record(record)
    path = f"{folder(source)}/{step.snapshot}"
    with files.enough_space(os.path.dirname(source)):
        os.makedirs(folder(source), exist_ok=True)
    files.remove_staged(folder(source))
    stock_layout.forget_links(folder(source))
    with files.published(path) as staged:
        if step.domain:
            running.copy(step.disk, step.domain, step.target, staged, format)
        else:
            _copy(source, staged)
        os.chmod(staged, 0o660)
        files.fsync(staged)
        with vm_dir.publishing(step.disk.vm, step.disk.vm_dir, planned, step.disk.disk):
            pass
    point("snapshot published")


def _copy(source: str, target: str) -> None:
    work(["cp", "--sparse=always", "--reflink=auto", "--", source, target])


def copy_back(source: str, snapshot: int, format: str = "raw", min_size: int = 0) -> None:
    """Replace an image's content by that of a snapshot beside it, of `min_size` bytes at least; its generation ends.

    Raise AnotherWriter if somebody writes to the image.
    """
    path = f"{folder(source)}/{snapshot}"
    dir_store.check(source)
    if not files.exists(path):
        raise MissingImage(f"{path} is not there on {os.uname().nodename}")
    # A guest would go on writing to a file without a name.
    writers.check_file(source)
    files.remove_staged(folder(source))
    # Not beside the image, where every name is an image's.
    staged = files.staged_name(f"{folder(source)}/image")
    try:
        with files.enough_space(os.path.dirname(source)):
            _copy(path, staged)
            inspection.check(staged, format, path)
            qemu_img.grow(staged, format, min_size)
            os.chmod(staged, 0o660)
            files.fsync(staged)
            point("revert staged")
            writers.check_file(source)
            dir_store.begin_session(dir_store.Stored(source))
            os.rename(staged, source)
    except BaseException:
        files.unlink(staged)
        raise
    files.fsync(os.path.dirname(source))
    point("image reverted")


def drop_copy(source: str, snapshot: int) -> None:
    """Remove a snapshot beside an image."""
    files.refresh(os.path.dirname(source), folder(source))
    files.remove_staged(folder(source))
    files.unlink(f"{folder(source)}/{snapshot}")
    point("snapshot removed")
    _remove_if_empty(folder(source))


def _remove_if_empty(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:
        pass


def flatten(source: str, snapshot: int, format: str = "raw", min_size: int = 0) -> None:
    """Make a snapshot the image's content and remove all snapshots, that one last: a rerun must find it."""
    dir_store.check(source)
    if numbers(source):
        copy_back(source, snapshot, format, min_size)
    for number in sorted(numbers(source), key=lambda number: number == snapshot):
        drop_copy(source, number)
    _remove_if_empty(folder(source))


def drop_copy_of(step: DropCopy) -> None:
    """Remove a snapshot beside the image of a disk in place."""
    record = vm_dir.record_of(step.disk)
    image = record["image"]
    assert isinstance(image, dict)
    dir_store.check_record(record)
    drop_copy(str(image["source"]), step.snapshot)


def copy_back_of(step: CopyBack) -> None:
    """Revert the image of a disk in place."""
    copy_back(step.source, step.snapshot, step.format)
