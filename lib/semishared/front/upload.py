# SPDX-License-Identifier: Apache-2.0
"""An upload, from PATH into the datastore: fetched, judged and converted on the front-end.

It works in BASE_PATH, for every kind of store. A store that the front-end changes gets the file. Another
machine gets extents, which it writes straight into the new image: nothing is staged there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .. import store
from ..errors import BadArguments, BadAttribute, RestrictedPath, UnsafeImage
from ..intake import judge, unpack
from ..intake import source as sources
from ..intake.source import Source
from ..model.store.datastore_steps import ReceiveImage
from ..opennebula.states import DatastoreType, ImageType
from ..plan.image import images
from ..store.dir import upload
from ..tools import extents, files, inspection, progress
from ..tools.effects import point
from ..units import MiB, human

if TYPE_CHECKING:
    from ..model.store.datastore_steps import StoreUpload
    from ..plan.store.datastore import Asked
    from .action import Action

NOTED = 64 * MiB
"""Bytes from which an upload is noted for `semishared jobs`: a smaller one is short."""
ALWAYS_RESTRICTED = ("/var/lib/one", "/etc", "/root", "/proc", "/sys", "/dev", "/run")


def measure(asked: Asked, action: Action) -> int:
    """Return the size in bytes that the image of an action will have."""
    return Upload(asked, action).size()


def publish(step: StoreUpload, asked: Asked, action: Action) -> str:
    """Publish the image of an action; return its format."""
    if asked.image.size < NOTED and "://" not in asked.image.path:
        return Upload(asked, action).carry_out(step)
    from ..tools import jobs

    with jobs.noted(action.name, "upload", image=f"image {asked.image.id}"):
        return Upload(asked, action).carry_out(step)


class Upload:
    """The content at the PATH of an action's image, and what may be done with it."""

    def __init__(self, asked: Asked, action: Action) -> None:
        self._image, self._datastore, self._most = asked.image, asked.datastore, asked.max_size
        self._action, self._config, self._report = action, action.config, action.report
        # oned has checked the quota for SIZE, by the answer to `stat`, a backup or a marketplace.
        self._bound = unpack.Bound(self._image.size, self._most)
        self._source = self._described()

    def _described(self) -> Source:
        """Return the source at the image's PATH; raise BadArguments for none, or an impossible one."""
        path = self._image.path
        if not path or any(not c.isprintable() for c in path):
            from ..tools import curl

            raise BadArguments(f"not a path: {curl.masked(path)!r}")
        sums = {kind: self._image.attribute(kind.upper()) for kind in ("md5", "sha1", "sha256")}
        decompress = self._datastore.attribute("NO_DECOMPRESS").lower()
        limit = self._datastore.attribute("LIMIT_TRANSFER_BW")
        if limit and not (limit.isascii() and limit.rstrip("kKmMgG").isdigit()):
            raise BadAttribute(f"LIMIT_TRANSFER_BW of datastore {self._datastore.id} is {limit!r}")
        is_file = self._datastore.type == DatastoreType.FILE_DS
        given = {kind: text for kind, text in sums.items() if text}
        taken = judge.DISC if self._image.type == ImageType.CDROM else judge.DISK
        return Source(
            path,
            given,
            decompress == "no" or (not decompress and not is_file),
            limit,
            judge.ANYTHING if is_file else taken,
        )

    def _check_allowed(self, real: str) -> None:
        """Raise RestrictedPath unless the datastore may read the file that PATH leads to."""
        home = os.path.expanduser("~")
        safe = self._datastore.attribute("SAFE_DIRS").split()
        restricted = self._datastore.attribute("RESTRICTED_DIRS").split()
        if not safe and not restricted:
            safe, restricted = ["/var/tmp"], ["/"]
        images.check_allowed(
            self._source.path,
            real,
            [os.path.realpath(p) for p in safe if p.startswith("/")],
            [os.path.realpath(p) for p in (*restricted, *ALWAYS_RESTRICTED, home)],
        )

    def _check_allowed_url(self) -> None:
        """Raise BadArguments, NotSupported or RestrictedPath unless the datastore may fetch the URL."""
        source = self._source
        source.check_url()
        if source.backup_store != -1 and self._image.attribute("FROM_BACKUP_DS") != str(source.backup_store):
            raise RestrictedPath(
                f"{source.path} is in a backup, which only a restore of that backup may read"
            )
        if source.backup_store != -1:
            from ..opennebula.oned import Oned

            images.check_backup(
                source.path, source.backup_store, source.backup_parts, self._image, Oned().images()
            )
        if source.ssh:
            images.check_allowed_ssh(source.path, self._datastore.attribute("SAFE_DIRS").split())

    def size(self) -> int:
        """Return the size in bytes that the image will have; its content stays where it is."""
        source, limit_s = self._source, self._config.uploads_stat_limit_s
        if source.is_url:
            from ..intake import web

            self._check_allowed_url()
            with unpack.within(limit_s, source.name):
                return self._not_empty(web.size_of(source, self._most, limit_s))
        with unpack.within(limit_s, source.path), sources.opened(source.path) as opened:
            self._check_allowed(sources.real_path(opened))
            return self._not_empty(sources.size_of(source, opened, self._most, limit_s))

    def _not_empty(self, size: int) -> int:
        """Return the size of a future disk; raise UnsafeImage for 0: making the file has failed."""
        if not size and self._datastore.type != DatastoreType.FILE_DS:
            raise UnsafeImage(f"{self._source.name} is empty: it holds no disk")
        return size

    def carry_out(self, step: StoreUpload) -> str:
        """Publish the image; return its format."""
        if self._source.is_url:
            self._check_allowed_url()
        name = "" if step.machine else os.path.basename(step.image.source)
        if step.machine:
            # No store: the directory where only the front-end works on uploads.
            os.makedirs(step.directory, exist_ok=True)
        with upload.uploading(step.directory, name) as up:
            kept = self._brought(up)
            self._not_empty(kept.manifest.size)
            found = self._judged(kept)
            format = step.image.format or self._stored_format(kept, found)
            path, image = upload.convert(kept.path, found, format, up), step.image._replace(format=format)
            if step.machine:
                sent = self._send(path, ReceiveImage(image, os.path.getsize(path)), step.machine)
                stored = f"{human(sent)} of data"
            else:
                known, sparse = (
                    kept.manifest if found == format else None,
                    (self._image.attribute("SPARSE") or self._datastore.attribute("SPARSE")).lower() != "no",
                )
                store.of(image.access).publish(image, path, known, sparse=sparse)
                stored = f"{human(files.allocated(image.source))} on disk"
        self._report.info(f"{self._source.name} stored as {image.source} ({stored})")
        return format

    def _brought(self, up: upload.Upload) -> unpack.Kept:
        """Return a private, decompressed copy of PATH with its checksums verified; it is not read again."""
        source, bound, config = self._source, self._bound, self._config
        if source.is_url:
            kept = sources.fetch(
                source, up.file("download"), bound, config.uploads_least_rate, config.uploads_least_rate_s
            )
        else:
            with sources.opened(source.path) as opened:
                self._check_allowed(sources.real_path(opened))
                kept = unpack.copy(opened, up.file("copy"), bound, source.path)
            point("copied in")
        sources.check_sums(kept.path, source.checksums, source.name)
        return (
            sources.decompress(kept, up.file("decompressed"), bound, source.name)
            if source.decompress
            else kept
        )

    def _judged(self, kept: unpack.Kept) -> str:
        """Return the format of a private copy; raise as judge.file, UploadTooLarge."""
        bound, source, name = self._bound, self._source, self._source.name
        found = judge.file(kept.path, source.taken, self._most, name, packed=not source.decompress)
        bound.check_disk(found.virtual_size, name)
        if found.format in images.STORED:
            bound.check_data(kept, found.format, name)
        if found.snapshots:
            self._report.warn(
                f"image {self._image.id}: {name} has {found.snapshots} internal snapshots, which no VM sees"
            )
        return found.format

    def _stored_format(self, kept: unpack.Kept, found: str) -> str:
        """Return the format to store it in; warn if a raw image's LUKS header contradicts its attributes."""
        has_header = found == "raw" and inspection.is_luks(kept.path)
        secret = self._image.luks_secret
        if has_header and not secret:
            self._report.info(
                f"image {self._image.id} has a LUKS header but no LUKS_SECRET: its guest has to "
                f"decrypt it itself"
            )
        if secret and not has_header:
            self._report.warn(
                f"image {self._image.id} has a LUKS_SECRET but no LUKS header: with that no VM "
                f"will start from it"
            )
        return images.stored_format(found, self._image, self._datastore, encrypted=has_header)

    def _send(self, path: str, step: ReceiveImage, machine: str) -> int:
        """Have a machine publish the raw file `path` as an image; return the bytes that crossed."""
        sent = 0
        with open(path, "rb") as file, self._action.session(machine, bulk=True) as session:
            made = extents.Copy(None, step.size)
            progress.expect(files.allocated(path), target=machine)
            session.begin([step])
            for index, content in extents.data(file.fileno(), step.size):
                if extents.is_zero(content):
                    continue
                made.add(index, content)
                session.send(extent=index)
                session.send_data(content)
                sent += len(content)
                progress.reached(sent, progress.goal.of)
            session.send(end=True, sha256=made.manifest(step.image.format).generation)
            session.finish()
        return sent
