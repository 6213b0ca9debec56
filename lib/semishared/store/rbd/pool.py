# SPDX-License-Identifier: Apache-2.0
"""The images of an RBD pool: made under a staged name and renamed when complete, cloned, removed, counted.

A crash leaves `one-35.semishared-<x>`. The next action on one-35 removes it once its maker's watch has ended
(30 s), else `semishared gc` does. A killed removal leaves an image without snapshots, which the next run
removes.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from contextlib import closing, contextmanager
from datetime import timezone
from typing import Any, Callable, Iterable, Iterator, Sequence

from ...errors import (
    CephUnavailable,
    DataInTheWay,
    ImageInUse,
    LateAction,
    MissingImage,
    NotSupported,
    TransferCorrupt,
    UploadTooLarge,
)
from ...model.refs import ImageRef
from ...model.store import rbd_names
from ...model.store.image_steps import StoredImage
from ...named import NamedTuple
from ...tools import extents, progress, qemu_img
from ...tools.effects import point
from ...units import human
from . import ceph, claim
from . import content as rbd_content
from . import image as rbd_image
from .content import Writing


@contextmanager
def published(where: ceph.Pool, name: str, made_for: str, seq: int = -1) -> Iterator[str]:
    """Yield a staged name for a new image; rename it to `name` when the block ends well, else remove it.

    `seq` is the VM's SEQ, if the image belongs to a VM; raise LateAction if an image of a later SEQ has the
    name.

    An existing image of that name is replaced if semishared made it for the same purpose and no client has
    written to it. Else raise DataInTheWay.
    """
    claim.settle_change(where, name)
    sweep(where, name)
    staged = rbd_names.staged(name, os.urandom(6).hex())
    try:
        yield staged
        with ceph.opened(where, staged) as image:
            image.metadata_set(rbd_names.MADE, made_for)
            if seq >= 0:
                image.metadata_set(rbd_names.SEQ, str(seq))
        point("image staged")
        refuse_late(where, name, seq)
        show(where, staged, name, made_for)
    except Exception:
        try:
            remove(where, staged, wait_s=0)
        except (CephUnavailable, ImageInUse):
            pass  # the next action on that image removes it
        raise


def show(where: ceph.Pool, staged: str, name: str, made_for: str) -> None:
    """Rename a complete image to its final name; raise DataInTheWay as `published`."""
    _clear_way(where, name, made_for)
    with ceph.understood(f"image {where.name}/{name}", where.user):
        where.rbd.rename(where.ioctx, staged, name)
    point("image published")


def _clear_way(where: ceph.Pool, name: str, made_for: str) -> None:
    try:
        with ceph.opened(where, name, read_only=True) as image:
            ours = (
                dict(image.metadata_list()).get(rbd_names.MADE) == made_for
                and rbd_image.content(image) is not None
            )
    except MissingImage:
        return
    if not ours:
        raise DataInTheWay(f"{where.name}/{name} is there already, and not by us or written to since")
    remove(where, name)


def refuse_late(where: ceph.Pool, name: str, seq: int) -> None:
    """Raise LateAction if an image was made for its VM at a later SEQ than the plan's.

    An image that does not belong to a VM has no SEQ.
    """
    if seq < 0:
        return
    try:
        with ceph.opened(where, name, read_only=True) as image:
            own = _noted(image, rbd_names.SEQ)
    except MissingImage:
        return
    if own > seq:
        raise LateAction(
            f"{where.name}/{name} was made at SEQ {own} of its VM's history, and this is of SEQ "
            f"{seq}: it is left as it is"
        )


def id_of(where: ceph.Pool, name: str) -> str:
    """Return an image's id: its name may belong to another image later, its id never."""
    with ceph.opened(where, name, read_only=True) as image:
        found: str = image.id()
        return found


def names(where: ceph.Pool) -> list[str]:
    """Return the names of all images of a pool."""
    with ceph.understood(f"pool {where.name}", where.user):
        found: list[str] = where.rbd.list(where.ioctx)
    return found


def sweep(where: ceph.Pool, name: str) -> None:
    """Remove what killed makers of an image have left, unless a client still has it open."""
    for left in names(where):
        if rbd_names.is_staged(left, name):
            try:
                remove(where, left, wait_s=0)
                point("staged image removed")
            except ImageInUse:
                pass


def create(where: ceph.Pool, name: str, size: int) -> None:
    """Make an empty image with the features of the site's Ceph configuration."""
    with ceph.understood(f"image {where.name}/{name}", where.user):
        where.rbd.create(where.ioctx, name, size, old_format=False, data_pool=where.access.data_pool or None)
    point("image made")


def copy(where: ceph.Pool, name: str, snapshot: str, target: str, most: int = 0) -> None:
    """Make `target`, an independent sparse copy of an image, or of its `snapshot` if that is not ''.

    Raise UploadTooLarge beyond `most` bytes (0: no limit), MissingImage.
    """
    with ceph.opened(where, name, read_only=True) as image:
        if snapshot:
            if rbd_image.find(image, snapshot) is None:
                raise MissingImage(f"snapshot {snapshot} of {where.name}/{name} is not there")
            image.set_snap(snapshot)
        if most and image.size() > most:
            raise UploadTooLarge(
                f"{where.name}/{name} has {human(image.size())}, and a disk of {human(most)} was approved"
            )
        if snapshot and image.overlap():
            _copy_with_parent(where, image, target)
        else:
            with ceph.long():
                image.copy(where.ioctx, target, data_pool=where.access.data_pool or None)
    point("image copied")


def _copy_with_parent(where: ceph.Pool, image: Any, target: str) -> None:
    """Copy an image that is open at a snapshot, and is a clone.

    librbd's own copy (16.2) leaves zeros there for objects that are only in the parent.
    """
    size = image.size()
    create(where, target, size)
    with ceph.opened(where, target) as made, closing(rbd_content.stream(image, size)) as found:
        writing = Writing(made)
        for index, content in found:
            writing.write(index * extents.EXTENT, content)
        writing.finish()


def remove(
    where: ceph.Pool, name: str, wait_s: float = rbd_image.WATCH_S, made: str = "", trash: bool = False
) -> bool:
    """Remove an image with its snapshots, or move all to the pool's trash; return False if there is none.

    Raise ImageInUse if it has clones or is open for `wait_s` seconds. `made` is the id that it must have, ''
    for any.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return _remove(where, name, made, trash)
        except ImageInUse:
            if time.monotonic() > deadline or _clones(where, name):
                raise
        time.sleep(1)
        progress.touch()


def _clones(where: ceph.Pool, name: str) -> list[str]:
    try:
        with ceph.opened(where, name, read_only=True) as image:
            return sorted(f"{child['pool']}/{child['image']}" for child in image.list_descendants())
    except MissingImage:
        return []


def _remove(where: ceph.Pool, name: str, made: str, trash: bool = False) -> bool:
    try:
        if made and id_of(where, name) != made:
            return False
        clones = _clones(where, name)
        if clones:
            raise ImageInUse(f"{where.name}/{name} has clones: {', '.join(clones[:5])}")
        with ceph.opened(where, name) as image:
            rbd_image.check_unused(image, f"{where.name}/{name}")
            for found in rbd_image.snapshots(image):
                # Ceph empties its trash of no image with snapshots, and marks are of no use there.
                if not trash or rbd_names.backed_up(found.name) is not None:
                    rbd_image.drop(image, found.name)
        with ceph.understood(f"image {where.name}/{name}", where.user), ceph.long():
            if trash:
                # Whole, with its other snapshots: `rbd trash restore` brings it back by its id.
                where.rbd.trash_move(where.ioctx, name)
            else:
                where.rbd.remove(where.ioctx, name)
    except MissingImage:
        return False
    point("image removed")
    return True


def remove_all(where: ceph.Pool, name: str, trash: bool = False) -> None:
    """Remove an image, the images staged for it, and those that stock reverts have set aside.

    With `trash` the image itself is moved to the pool's trash.
    """
    claim.settle_change(where, name)
    aside = re.compile(re.escape(name) + r"-[0-9]+(:[0-9]+)*\Z")
    remove(where, name, trash=trash)
    left = [found for found in names(where) if rbd_names.is_staged(found, name) or aside.match(found)]
    while left:
        failed = []
        for found in left:
            try:
                remove(where, found, wait_s=rbd_image.WATCH_S if len(left) == 1 else 0)
            except ImageInUse:
                failed.append(found)
        if len(failed) == len(left):
            # All are in use, and none depends on another: raise ImageInUse.
            remove(where, failed[0])
        left = failed
    point("all of the image removed")


def check_not_aside(where: ceph.Pool, name: str, snapshot: int) -> None:
    """Raise NotSupported for a snapshot that OpenNebula's own revert has moved to another image."""
    claim.settle_change(where, name)
    with ceph.opened(where, name, read_only=True) as image:
        if rbd_image.find(image, str(snapshot)):
            return
    aside = re.compile(rf"{re.escape(name)}-(?:[0-9]+:)*{snapshot}(?::[0-9]+)*\Z")
    for found in filter(aside.match, names(where)):
        raise NotSupported(
            f"snapshot {snapshot} of {where.name}/{name} lies in {found}, where OpenNebula's own "
            f"ceph driver has put it: go back to "
            "it or delete it with that driver"
        )


def clone(where: ceph.Pool, name: str, snapshot: str, target: str) -> None:
    """Make `target`, a copy-on-write clone of a snapshot of an image."""
    # Asked in advance: librbd 16 may hang in the open that follows a refused clone.
    if not _clones_any_snapshot(where):
        with ceph.opened(where, name) as image:
            rbd_image.create(image, snapshot, protect=True)
    with ceph.understood(f"clone {where.name}/{target}", where.user):
        where.rbd.clone(
            where.ioctx, name, snapshot, where.ioctx, target, data_pool=where.access.data_pool or None
        )
    point("clone made")


def _clones_any_snapshot(where: ceph.Pool) -> bool:
    """Return True if librbd clones unprotected snapshots: if no client older than Mimic is allowed."""
    cluster = ceph.cluster(where.access, where.user)
    format = cluster.conf_get("rbd_default_clone_format")
    if format in ("1", "2"):
        return bool(format == "2")
    code, said, _ = cluster.mon_command(
        json.dumps({"prefix": "osd get-require-min-compat-client"}), b"", timeout=ceph.ANSWER_S
    )
    # The names of releases are in alphabetical order.
    return bool(code == 0 and said.strip()[:1] >= b"m")


def capacity(where: ceph.Pool) -> tuple[int, int, int]:
    """Return bytes used, total and free of a pool (or the store's data pool), by `ceph df`."""
    wanted = where.access.data_pool or where.name
    request = json.dumps({"prefix": "df", "detail": "detail", "format": "json"})
    with ceph.understood(f"capacity of pool {wanted}", where.user):
        code, said, why = ceph.cluster(where.access, where.user).mon_command(
            request, b"", timeout=ceph.ANSWER_S
        )
    if code:
        raise CephUnavailable(f"capacity of pool {wanted}: {why or code}")
    stats = next(
        (pool["stats"] for pool in json.loads(said).get("pools", []) if pool["name"] == wanted), None
    )
    if stats is None:
        raise MissingImage(f"pool {wanted} is not there")
    free, used = int(stats["max_avail"]), int(stats.get("stored", stats.get("bytes_used", 0)))
    quota = int(stats.get("quota_bytes", 0))
    if quota:
        free = min(free, max(quota - used, 0))
    return used, used + free, free


def check_supported(where: ceph.Pool, name: str) -> int:
    """Return the size of an image for a guest; raise NotSupported for RBD format 1."""
    with ceph.opened(where, name, read_only=True) as image:
        if image.old_format():
            raise NotSupported(
                f"{where.name}/{name} has RBD format 1, which has no layering: copy it with `rbd copy`"
            )
        size: int = image.size()
        return size


def look(where: ceph.Pool, name: str) -> StoredImage | None:
    """Return age, size, maker, watchers and clones of an image (plan/care/gc_stores.py), None if gone."""
    try:
        with ceph.opened(where, name, read_only=True) as image:
            changed = max(image.create_timestamp(), image.modify_timestamp()).replace(tzinfo=timezone.utc)
            return StoredImage(
                int(time.time() - changed.timestamp()),
                image.size(),
                dict(image.metadata_list()).get(rbd_names.MADE, ""),
                [watcher["addr"] for watcher in image.watchers_list()],
                _clones(where, name),
            )
    except MissingImage:
        return None


# -- whose a VM is (store.Store.note_epoch) ----------------------------------------------------------


def note_epoch(image: ImageRef, where: ceph.Pool, name: str, vm: int, number: int) -> None:
    """Record an epoch, unless a later one is recorded."""
    key = rbd_names.epoch(vm, image.access.cloud)
    with ceph.opened(where, name) as opened:
        if _noted(opened, key) < number:
            opened.metadata_set(key, str(number))
    point("epoch noted")


def epoch(image: ImageRef, where: ceph.Pool, name: str, vm: int) -> int:
    """Return the recorded epoch, -1 for none."""
    with ceph.opened(where, name, read_only=True) as opened:
        return _noted(opened, rbd_names.epoch(vm, image.access.cloud))


def _noted(opened: Any, key: str) -> int:
    said = str(dict(opened.metadata_list()).get(key, ""))
    return int(said) if said.isdigit() else -1


# -- new images, frozen before a host sees them -----------------------------------------------------


def made_for(image: ImageRef) -> str:
    """Return the mark of images that semishared makes; an image of another maker lacks it."""
    return rbd_names.made_for(image.store, image.source)


class RbdDraft(NamedTuple):
    """New content for an existing, empty image of the right size."""

    path: str

    def fill(self, source: str, format: str, *, share: bool = False) -> None:
        qemu_img.fill(source, format, self.path, share=share)
        point("image filled")


def received(
    where: ceph.Pool,
    name: str,
    made_for: str,
    size: int,
    arriving: Iterable[tuple[int, bytes]],
    said: Callable[[], str] | None,
) -> str:
    """Make an image from extents and return its generation; raise TransferCorrupt if `said` differs."""
    with published(where, name, made_for) as staged:
        create(where, staged, size)
        with ceph.opened(where, staged) as image:
            made, writing = extents.Copy(None, size), Writing(image)
            for index, content in arriving:
                made.add(index, content)
                writing.write(index * extents.EXTENT, content)
            writing.finish()
            generation = made.manifest("raw").generation
            if said and generation != said():
                raise TransferCorrupt(
                    f"{where.name}/{name}: what arrived on {os.uname().nodename} is not what was sent"
                )
            point("image received")
            rbd_content.write_manifest(image, made.manifest("raw"))
            rbd_image.create(image, rbd_names.frozen(generation))
    return generation


def empty(
    where: ceph.Pool, name: str, made_for: str, size: int, fs: str, fs_options: Sequence[str] = ()
) -> None:
    """Make an empty image, with a file system unless `fs` is ''."""
    with published(where, name, made_for) as staged:
        create(where, staged, size)
        if fs:
            _make_file_system(where, staged, size, fs, fs_options)
        _freeze(where, staged)


def copied(
    where: ceph.Pool, name: str, made_for: str, of: ceph.Pool, source: str, snapshot: str, most: int = 0
) -> None:
    """Make an image an independent copy of another one, or of its `snapshot` if that is not ''.

    Raise UploadTooLarge beyond `most` bytes.
    """
    with published(where, name, made_for) as staged:
        copy(of, source, snapshot, staged, most)
        _freeze(where, staged)


def _freeze(where: ceph.Pool, name: str) -> None:
    with ceph.opened(where, name) as image:
        rbd_image.create(image, rbd_names.NEW)


def publish(where: ceph.Pool, staged: str, name: str, made_for: str) -> None:
    """Publish a staged image that a host has filled."""
    with ceph.opened(where, staged) as image:
        rbd_image.create(image, rbd_names.NEW)
        image.metadata_set(rbd_names.MADE, made_for)
    point("image staged")
    show(where, staged, name, made_for)


def _make_file_system(where: ceph.Pool, name: str, size: int, fs: str, fs_options: Sequence[str]) -> None:
    """Make the file system in a sparse local file, as mkfs needs one, and write that to the image."""
    with tempfile.TemporaryDirectory(prefix="semishared-mkfs-") as folder:
        path = f"{folder}/image"
        qemu_img.make_empty(path, "raw", size, fs, options=fs_options)
        point("file system made")
        with open(path, "rb") as file, ceph.opened(where, name) as image:
            writing = Writing(image)
            for index, content in extents.data(file.fileno(), size):
                writing.write(index * extents.EXTENT, content)
            writing.finish()
