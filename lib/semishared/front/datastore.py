# SPDX-License-Identifier: Apache-2.0
"""The datastore actions: argv is an id, stdin is DS_DRIVER_ACTION_DATA, stdout is the answer (docs/explanation/contract.md).

Here for mounted stores; what the others do differently is in network_datastore.py.
"""

from __future__ import annotations

import os
import sys

from ..config import Config, load
from ..errors import BadArguments, BadAttribute, RestrictedPath, StoreUnavailable
from ..intake import private_copy
from ..intake import source as sources
from ..intake.source import Source
from ..model import stores
from ..opennebula.args import absolute, number
from ..opennebula.report import Report
from ..opennebula.xml import Datastore, DriverData, Image
from ..plan import images
from ..store import dir_image, dir_snapshots, dir_upload, marker, stock_layout
from ..tools import files, inspection, standstill
from ..tools.crash_points import point
from ..tools.mkfs import MKFS
from ..units import GiB, MiB, human, mib_ceil

SAVE_AS = "save_as"
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

    def check_inside(self, path: str) -> str:
        """Return the SOURCE `path` if it is an image of this datastore; raise RestrictedPath."""
        plain = absolute(path, "SOURCE")
        if os.path.dirname(plain) != self.directory or os.path.basename(plain).startswith("."):
            raise RestrictedPath(f"{plain} is no image of datastore {self.datastore.id}")
        return plain


def stat(request: Request) -> str:
    """Print the size in MiB that the image at PATH will have."""
    source, limit_s = request.source, request.config.uploads_stat_limit_s
    if source.is_url:
        from ..intake import web

        request.check_allowed_url(source)
        with private_copy.within(limit_s, source.path):
            size = web.size_of(source, request.max_size, limit_s)
    else:
        with private_copy.within(limit_s, source.path), sources.opened(source.path) as opened:
            request.check_allowed(source.path, sources.real_path(opened))
            size = sources.size_of(opened, request.max_size, source.path, source.decompress, limit_s)
    return str(mib_ceil(size))


def cp(request: Request) -> str:
    """Bring the image at PATH into the datastore; print SOURCE and FORMAT."""
    source = request.source
    if source.is_url:
        request.check_allowed_url(source)
    with dir_upload.uploading(request.directory) as up:
        kept = bring(request, source, up)
        found = judge(request, source, kept)
        wanted = images.stored_format(found, request.image, request.datastore, encrypted=_is_encrypted(request, kept, found))
        path = dir_upload.convert(kept.path, found, wanted, up)
        known = kept.manifest if found == wanted else None
        stored = up.target
        dir_upload.publish(path, wanted, stored, known, sparse=request.datastore.attribute("SPARSE").lower() != "no")
    request.report.info(f"{source.path} stored as {stored} ({human(files.allocated(stored))} on disk)")
    return f"{stored} {wanted}"


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


def mkfs(request: Request) -> str:
    """Create an empty image; print SOURCE alone, the whole line is taken for it."""
    image = request.image
    if image.format == SAVE_AS:
        return f"{request.directory}/{os.urandom(16).hex()}"
    format = images.format_of(image, request.datastore)
    if format not in images.STORED:
        raise BadAttribute(f"FORMAT of image {image.id} is {format!r}, not one of {', '.join(images.STORED)}")
    fs = image.file_system or image.attribute("FS").lower()
    if fs and fs not in MKFS:
        raise BadAttribute(f"FS of image {image.id} is {fs!r}, not one of {', '.join(sorted(MKFS))}")
    if not 0 < image.size <= request.max_size:
        raise BadAttribute(f"SIZE of image {image.id} is {image.size // MiB} MiB; 1 to {request.max_size // MiB} are possible")
    with dir_upload.uploading(request.directory) as up:
        return dir_upload.create(format, image.size, fs, up)


def clone(request: Request) -> str:
    """Copy another image (PATH is its SOURCE) into the datastore; print SOURCE and FORMAT."""
    path = absolute(request.image.path, "PATH")
    format = images.format_of(request.image, request.datastore)
    with dir_image.opened(path) as opened, dir_upload.uploading(request.directory) as up:
        stock_layout.refuse(path, format)
        # A disk may have grown since oned heard of its size.
        kept = private_copy.copy(opened, up.file("copy"), private_copy.Bound(0, request.max_size), path)
        point("copied in")
        # The format is oned's word: a raw image may look like anything, that is its guest's affair.
        inspection.check(kept.path, format, path)
        if format != "raw":
            inspection.inspect(kept.path, request.max_size, path)
        dir_upload.publish(kept.path, format, up.target, kept.manifest)
        return f"{up.target} {format}"


def rm(request: Request) -> str:
    """Remove the image SOURCE; one that is not there is removed already."""
    if request.image.source:
        dir_upload.remove(request.check_inside(request.image.source))
    return ""


def _snapshot(request: Request) -> tuple[str, int]:
    source = request.check_inside(request.image.source)
    stock_layout.refuse(source, images.format_of(request.image, request.datastore))
    return source, number(request.image.text("TARGET_SNAPSHOT"), "TARGET_SNAPSHOT")


def snap_delete(request: Request) -> str:
    """Remove the image's TARGET_SNAPSHOT; one that is not there is removed already."""
    source, snapshot = _snapshot(request)
    dir_image.check(source)
    dir_snapshots.drop_copy(source, snapshot)
    return ""


def snap_revert(request: Request) -> str:
    """Make the image's TARGET_SNAPSHOT its content; all snapshots stay."""
    dir_snapshots.copy_back(*_snapshot(request), images.format_of(request.image, request.datastore), request.image.size)
    return ""


def snap_flatten(request: Request) -> str:
    """Make the image's TARGET_SNAPSHOT its content and remove all snapshots; without any it is done already."""
    dir_snapshots.flatten(*_snapshot(request), images.format_of(request.image, request.datastore), request.image.size)
    return ""


def export(request: Request) -> str:
    """Print IMPORT_INFO for the marketplace: SOURCE is a path that OpenNebula's downloader reads on the front-end."""
    from xml.sax.saxutils import escape

    image, format = request.image, images.format_of(request.image, request.datastore)
    source = request.check_inside(image.source)
    with dir_image.opened(source) as opened:
        stock_layout.refuse(source, format)
        digest = sources.checksum(opened, "md5")
    facts = {
        "IMPORT_SOURCE": source, "MD5": digest, "SIZE": str(image.size // MiB), "FORMAT": format,
        "DISPOSE": "NO",
    }  # fmt: skip
    return f"<IMPORT_INFO>{''.join(f'<{name}>{escape(text)}</{name}>' for name, text in facts.items())}</IMPORT_INFO>"


def monitor(request: Request) -> str:
    """Print the capacity of the file system that holds the datastore, in MiB."""
    try:
        if not stores.access(request.datastore).marker:
            os.makedirs(request.directory, exist_ok=True)
        stat = os.statvfs(request.directory)
    except OSError as e:
        raise StoreUnavailable(f"{request.directory}: {e.strerror}") from None
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    used = total - stat.f_bfree * stat.f_frsize
    return f"USED_MB={used // MiB}\nTOTAL_MB={total // MiB}\nFREE_MB={free // MiB}"


ACTIONS = {"stat": stat, "cp": cp, "mkfs": mkfs, "clone": clone, "rm": rm, "monitor": monitor,
           "snap_delete": snap_delete, "snap_revert": snap_revert, "snap_flatten": snap_flatten, "export": export}  # fmt: skip


def act(action: str, argv: list[str], report: Report) -> str:
    """Carry out a datastore action and return what goes to stdout."""
    request = Request(argv, report)
    access = stores.access(request.datastore)
    if access.can.is_mounted:
        if action != "stat":
            # First of all: below a mount point that is not mounted nothing is made, counted or found to be gone.
            marker.check(request.directory, access.marker)
            if not access.marker:
                report.warn(stores.unmarked(request.datastore))
        return ACTIONS[action](request)
    from . import rbd_datastore

    return rbd_datastore.ACTIONS.get(action, ACTIONS[action])(request)
