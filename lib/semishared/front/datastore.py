# SPDX-License-Identifier: Apache-2.0
"""The datastore actions: argv is an id, stdin is DS_DRIVER_ACTION_DATA, stdout is the answer (docs/explanation/contract.md).

Planned in plan/datastore.py; here is what the front-end does itself.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ..config import Config, load
from ..errors import BadArguments, BadAttribute, RestrictedPath, StoreUnavailable
from ..intake import private_copy
from ..intake import source as sources
from ..intake.source import Source
from ..model import steps_front as f
from ..model import stores
from ..model.exchange import Part
from ..model.refs import Step
from ..opennebula.args import absolute
from ..opennebula.report import Report
from ..opennebula.xml import Datastore, DriverData, Image
from ..plan import datastore as plans
from ..plan import images
from ..store import dir_image, dir_snapshots, dir_upload, marker, stock_layout
from ..tools import files, inspection, standstill
from ..tools.crash_points import point
from ..tools.mkfs import MKFS
from ..units import GiB, human
from .action import Action, carry_out

ALWAYS_RESTRICTED = ("/var/lib/one", "/etc", "/root", "/proc", "/sys", "/dev", "/run")


class Request:
    """What a datastore action is asked."""

    def __init__(self, argv: list[str], report: Report) -> None:
        if not argv:
            raise BadArguments("no id")
        self.report = report
        self.config: Config = load()
        standstill.limit_s = self.config.hosts_standstill_timeout_s
        data = DriverData(sys.stdin.buffer.read())
        self.image: Image = data.image
        self.datastore: Datastore = data.datastore

    @property
    def directory(self) -> str:
        return absolute(self.datastore.base_path, "BASE_PATH")

    @property
    def max_size(self) -> int:
        return self.config.images_max_virtual_size_gib * GiB

    @property
    def bound(self) -> private_copy.Bound:
        """How large the image may be. SIZE is what `stat` said, or a backup or a marketplace; oned has asked the quota for that."""
        return private_copy.Bound(self.image.size, self.max_size)

    @property
    def source(self) -> Source:
        """The image's PATH; raise BadArguments if it has none or one that no file can have."""
        path = self.image.path
        if not path or any(not c.isprintable() for c in path):
            raise BadArguments(f"not a path: {path!r}")
        sums = {kind: self.image.attribute(kind.upper()) for kind in ("md5", "sha1", "sha256")}
        decompress = self.datastore.attribute("NO_DECOMPRESS").lower()
        limit = self.datastore.attribute("LIMIT_TRANSFER_BW")
        if limit and not (limit.isascii() and limit.rstrip("kKmMgG").isdigit()):
            raise BadAttribute(f"LIMIT_TRANSFER_BW of datastore {self.datastore.id} is {limit!r}")
        is_file = self.datastore.type == images.FILE_DATASTORE
        given = {kind: text for kind, text in sums.items() if text}
        return Source(path, given, decompress == "no" or (not decompress and not is_file), limit)

    def check_allowed(self, path: str, real: str) -> None:
        """Raise RestrictedPath unless the datastore may read the file that `path` leads to."""
        home = os.path.expanduser("~")
        safe = self.datastore.attribute("SAFE_DIRS").split()
        restricted = self.datastore.attribute("RESTRICTED_DIRS").split()
        if not safe and not restricted:
            safe, restricted = ["/var/tmp"], ["/"]
        images.check_allowed(
            path, real, [os.path.realpath(p) for p in safe if p.startswith("/")],
            [os.path.realpath(p) for p in (*restricted, *ALWAYS_RESTRICTED, home)],
        )  # fmt: skip

    def check_allowed_url(self, source: Source) -> None:
        """Raise BadArguments, NotSupported or RestrictedPath unless the datastore may fetch the URL."""
        source.check_url()
        if source.backup_store != -1 and self.image.attribute("FROM_BACKUP_DS") != str(source.backup_store):
            raise RestrictedPath(f"{source.path} is in a backup, which only a restore of that backup may read")
        if source.ssh:
            images.check_allowed_ssh(source.path, self.datastore.attribute("SAFE_DIRS").split())


class FrontEnd:
    """What the front-end does itself: steps of model/steps_front.py to functions."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def do(self, step: Step) -> Any:
        """Carry out one step."""
        return getattr(self, type(step).__name__)(step)

    def CheckMarker(self, step: f.CheckMarker) -> None:
        marker.check(step.directory, step.marker)
        if not step.marker:
            self._request.report.warn(stores.unmarked(self._request.datastore))

    def MeasureSource(self, step: f.MeasureSource) -> int:
        request = self._request
        source, limit_s = request.source, request.config.uploads_stat_limit_s
        if source.is_url:
            from ..intake import web

            request.check_allowed_url(source)
            with private_copy.within(limit_s, source.path):
                return web.size_of(source, request.max_size, limit_s)
        with private_copy.within(limit_s, source.path), sources.opened(source.path) as opened:
            request.check_allowed(source.path, sources.real_path(opened))
            return sources.size_of(opened, request.max_size, source.path, source.decompress, limit_s)

    def StoreUpload(self, step: f.StoreUpload) -> tuple[str, str]:
        request, source = self._request, self._request.source
        if source.is_url:
            request.check_allowed_url(source)
        with dir_upload.uploading(step.directory) as up:
            kept = bring(request, source, up)
            found = judge(request, source, kept)
            wanted = images.stored_format(found, request.image, request.datastore, encrypted=_is_encrypted(request, kept, found))
            path = dir_upload.convert(kept.path, found, wanted, up)
            known = kept.manifest if found == wanted else None
            stored = up.target
            dir_upload.publish(path, wanted, stored, known, sparse=request.datastore.attribute("SPARSE").lower() != "no")
        request.report.info(f"{source.path} stored as {stored} ({human(files.allocated(stored))} on disk)")
        return stored, wanted

    def SendUpload(self, step: f.SendUpload) -> None:
        from . import rbd_datastore

        rbd_datastore.send_upload(self._request, step)

    def MakeFile(self, step: f.MakeFile) -> str:
        with dir_upload.uploading(step.directory) as up:
            return dir_upload.create(step.format, step.size, step.fs, up)

    def CopyStoredFile(self, step: f.CopyStoredFile) -> str:
        path, format, max_size = step.path, step.format, self._request.max_size
        with dir_image.opened(path) as opened, dir_upload.uploading(step.directory) as up:
            stock_layout.refuse(path, format)
            # A disk may have grown since oned heard of its size.
            kept = private_copy.copy(opened, up.file("copy"), private_copy.Bound(0, max_size), path)
            point("copied in")
            # The format is oned's word: a raw image may look like anything, that is its guest's affair.
            inspection.check(kept.path, format, path)
            if format != "raw":
                inspection.inspect(kept.path, max_size, path)
            dir_upload.publish(kept.path, format, up.target, kept.manifest)
            return up.target

    def RemoveStored(self, step: f.RemoveStored) -> None:
        dir_upload.remove(step.path)

    def DropSnapshot(self, step: f.DropSnapshot) -> None:
        stock_layout.refuse(step.path, step.format)
        dir_image.check(step.path)
        dir_snapshots.drop_copy(step.path, step.snapshot)

    def RevertStored(self, step: f.RevertStored) -> None:
        stock_layout.refuse(step.path, step.format)
        dir_snapshots.copy_back(step.path, step.snapshot, step.format, step.min_size)

    def FlattenStored(self, step: f.FlattenStored) -> None:
        stock_layout.refuse(step.path, step.format)
        dir_snapshots.flatten(step.path, step.snapshot, step.format, step.min_size)

    def DigestStored(self, step: f.DigestStored) -> str:
        with dir_image.opened(step.path) as opened:
            stock_layout.refuse(step.path, step.format)
            return sources.checksum(opened, step.kind)

    def MakeStore(self, step: f.MakeStore) -> None:
        try:
            os.makedirs(step.directory, exist_ok=True)
        except OSError as e:
            raise StoreUnavailable(f"{step.directory}: {e.strerror}") from None

    def MeasureStore(self, step: f.MeasureStore) -> dict[str, int]:
        try:
            stat = os.statvfs(step.directory)
        except OSError as e:
            raise StoreUnavailable(f"{step.directory}: {e.strerror}") from None
        total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
        return {"used": total - stat.f_bfree * stat.f_frsize, "total": total, "free": free}


def bring(request: Request, source: Source, up: dir_upload.Upload) -> private_copy.Kept:
    """Return a private copy of what is at PATH, decompressed, with the checksums it should have. Nothing is read from there again."""
    bound, config = request.bound, request.config
    if source.is_url:
        kept = sources.fetch(source, up.file("download"), bound, config.uploads_least_rate, config.uploads_least_rate_s)
    else:
        with sources.opened(source.path) as opened:
            request.check_allowed(source.path, sources.real_path(opened))
            kept = private_copy.copy(opened, up.file("copy"), bound, source.path)
        point("copied in")
    sources.check_sums(kept.path, source.checksums, source.path)
    return sources.decompress(kept, up.file("decompressed"), bound, source.path) if source.decompress else kept


def judge(request: Request, source: Source, kept: private_copy.Kept) -> str:
    """Return the format of a private copy; raise UnsafeImage, UploadTooLarge."""
    bound = request.bound
    if request.datastore.type == images.FILE_DATASTORE or request.image.type == images.CDROM:
        bound.check_data(kept, "raw", source.path)
        return "raw"
    found = inspection.inspect(kept.path, request.max_size, source.path)
    bound.check_disk(found.virtual_size, source.path)
    if found.format in images.STORED:
        bound.check_data(kept, found.format, source.path)
    return found.format


def _is_encrypted(request: Request, kept: private_copy.Kept, found: str) -> bool:
    """Tell whether a raw image begins with a LUKS header, and say if that does not go with its attributes."""
    has_header = found == "raw" and inspection.is_luks(kept.path)
    secret = request.image.luks_secret
    if has_header and not secret:
        request.report.info(f"image {request.image.id} has a LUKS header but no LUKS_SECRET: its guest has to decrypt it itself")
    if secret and not has_header:
        request.report.warn(f"image {request.image.id} has a LUKS_SECRET but no LUKS header: with that no VM will start from it")
    return has_header


ACTIONS = plans.PLANNERS


def planned(action: Action) -> Part[str]:
    """Return the plan of a datastore action, which returns what goes to stdout."""
    request = Request(action.argv, action.report)
    action.here = FrontEnd(request).do
    known = tuple(MKFS)
    asked = plans.Asked(request.image, request.datastore, request.max_size, known, os.urandom(16).hex(), os.uname().nodename)
    return ACTIONS[action.name](asked)


def act(action: str, argv: list[str], report: Report) -> str:
    """Carry out a datastore action and return what goes to stdout."""
    under_way = Action(action, argv, report)
    return carry_out(planned(under_way), under_way)
