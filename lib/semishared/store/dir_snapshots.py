# SPDX-License-Identifier: Apache-2.0
"""Snapshots of an image, or of a disk that is one: independent copies beside it.

    SOURCE           always the present content, in the image's own format, whoever asks
    SOURCE.snap/0    the content when snapshot 0 was taken, in the same format

What each crash leaves: a staged file in SOURCE.snap, removed by the next operation on the image.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

from ..disk import layers, vm_dir
from ..disk.epochs import Planned
from ..errors import MissingImage
from ..guest import block_jobs
from ..intake import inspection
from ..model.steps import CopyBack, CopyOut, DropCopy
from ..tools import beneath, files, qemu_img
from ..tools.crash_points import point
from ..tools.run import work
from . import dir_store, stock_layout, writers


def folder(source: str) -> str:
    """Return the directory of an image's snapshots."""
    return f"{source}.snap"


@contextmanager
def _opened(source: str, *, make: bool = False) -> Iterator[str]:
    """Yield a path to the directory of an image's snapshots that stays where it is now."""
    with beneath.directory(os.path.dirname(source), os.path.basename(folder(source)), make=make) as path:
        yield path


def numbers(source: str) -> list[int]:
    """Return the numbers of an image's snapshots."""
    try:
        with _opened(source) as path:
            return layers.numbered(path)
    except FileNotFoundError:
        return []


def copy_out(step: CopyOut, planned: Planned) -> dict[str, object]:
    """Publish a snapshot of a disk in place: a copy beside the image, from the running guest if there is one."""
    record = vm_dir.record_of(step.disk)
    image = record["image"]
    assert isinstance(image, dict)
    source, format = str(image["source"]), str(record["format"])
    dir_store.check_record(record)
    found: dict[str, object] = {}
    with files.enough_space(os.path.dirname(source)), _opened(source, make=True) as snapshots:
        files.remove_staged(snapshots)
        stock_layout.forget_links(snapshots)
        with files.published(f"{snapshots}/{step.snapshot}") as staged:
            if step.domain:
                # libvirt opens it by its name: as another user, through no file of ours.
                found = block_jobs.copy(step.disk, step.domain, step.target, beneath.readable(staged), format, step.freeze).to_data()
                files.set_mode(staged, 0o660)
            else:
                with dir_store.opened(source) as path:
                    _copy(path, staged)
            files.fsync(staged)
            with vm_dir.publishing(step.disk.vm, step.disk.vm_dir, planned, step.disk.disk):
                pass
    point("snapshot published")
    return found


def _copy(source: str, target: str) -> None:
    with files.made(target) as made:
        work(["cp", "--sparse=always", "--reflink=auto", "--", source, made])


def copy_back(source: str, snapshot: int, format: str = "raw", min_size: int = 0) -> None:
    """Replace an image's content by that of a snapshot beside it, of `min_size` bytes at least; its generation ends.

    Raise AnotherWriter if somebody writes to the image.
    """
    dir_store.check(source)
    with _opened(source) as snapshots:
        try:
            fd = beneath.open_file(snapshots, str(snapshot))
        except FileNotFoundError:
            raise MissingImage(f"{folder(source)}/{snapshot} is not there on {os.uname().nodename}") from None
        try:
            # A guest would go on writing to a file without a name.
            writers.check_file(source)
            _put_back(source, beneath.path_of(fd), snapshots, format, min_size)
        finally:
            os.close(fd)
    files.fsync(os.path.dirname(source))
    point("image reverted")


def _put_back(source: str, path: str, snapshots: str, format: str, min_size: int) -> None:
    files.remove_staged(snapshots)
    # Not beside the image, where every name is an image's.
    staged = files.staged_name(f"{snapshots}/image")
    try:
        with files.enough_space(os.path.dirname(source)):
            with files.made(staged) as made:
                work(["cp", "--sparse=always", "--reflink=auto", "--", path, made])
                inspection.check(made, format, beneath.readable(path))
                qemu_img.grow(made, format, min_size)
            point("revert staged")
            writers.check_file(source)
            dir_store.begin_session(dir_store.Stored(source))
            os.rename(staged, source)
    except BaseException:
        files.unlink(staged)
        raise


def drop_copy(source: str, snapshot: int) -> None:
    """Remove a snapshot beside an image."""
    try:
        with _opened(source) as snapshots:
            files.remove_staged(snapshots)
            files.unlink(f"{snapshots}/{snapshot}")
    except FileNotFoundError:
        pass
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
