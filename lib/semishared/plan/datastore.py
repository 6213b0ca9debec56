# SPDX-License-Identifier: Apache-2.0
"""Plans of the datastore actions: each returns what goes to stdout. Mounted stores are the front-end's own, pools their bridge's."""

from __future__ import annotations

import posixpath
from typing import NamedTuple, Tuple

from ..errors import BadAttribute, RestrictedPath
from ..model import layout_pool, stores
from ..model import steps_front as f
from ..model.exchange import Here, On, Part
from ..model.refs import ImageRef
from ..opennebula.args import absolute, number
from ..opennebula.xml import Datastore, Image
from ..units import MiB, mib_ceil
from . import images

SAVE_AS = "save_as"


class Asked(NamedTuple):
    """What a datastore action is asked, and what the front-end adds."""

    image: Image
    datastore: Datastore
    max_size: int
    file_systems: Tuple[str, ...]
    """Those that can be made."""
    token: str
    """A name that no image has."""
    node: str
    """What the front-end is called."""

    @property
    def access(self) -> stores.Access:
        return stores.access(self.datastore)

    @property
    def directory(self) -> str:
        return absolute(self.datastore.base_path, "BASE_PATH")

    @property
    def bridge(self) -> str:
        return stores.bridge(self.datastore, max(self.image.id, 0))

    @property
    def format(self) -> str:
        return images.format_of(self.image, self.datastore)

    @property
    def path(self) -> str:
        """SOURCE, if it is an image of this mounted datastore; raise RestrictedPath."""
        plain = absolute(self.image.source, "SOURCE")
        if posixpath.dirname(plain) != self.directory or posixpath.basename(plain).startswith("."):
            raise RestrictedPath(f"{plain} is no image of datastore {self.datastore.id}")
        return plain

    def ref(self, source: str = "") -> ImageRef:
        """Return the image in the pool that `source` names, else the new one of this id; raise RestrictedPath."""
        pool = stores.pool(self.datastore)
        found = images.ref_at(self.datastore.id, self.access, self.image.id, source or f"{pool}/{layout_pool.image(self.image.id)}")
        if stores.pool_and_name(found.source)[0] != pool:
            raise RestrictedPath(f"{found.source} is no image of datastore {self.datastore.id}, whose pool is {pool}")
        return found


def _is_mounted(asked: Asked) -> Part[bool]:
    """Return whether the store is a directory here; below a mount point that is not mounted nothing is made, counted or gone."""
    access = asked.access
    if access.can.is_mounted:
        yield Here(f.CheckMarker(asked.directory, access.marker))
    return access.can.is_mounted


def stat(asked: Asked) -> Part[str]:
    """Plan stat: the size in MiB that the image at PATH will have."""
    size = yield Here(f.MeasureSource(asked.image.path))
    return str(mib_ceil(size))


def cp(asked: Asked) -> Part[str]:
    """Plan cp: bring the image at PATH into the datastore; SOURCE and FORMAT."""
    if (yield from _is_mounted(asked)):
        stored, format = yield Here(f.StoreUpload(asked.image.path, asked.directory))
        return f"{stored} {format}"
    ref = asked.ref()
    yield Here(f.SendUpload(asked.image.path, asked.directory, ref, asked.bridge))
    return f"{ref.source} {ref.format}"


def mkfs(asked: Asked) -> Part[str]:
    """Plan mkfs: an empty image; SOURCE alone, the whole line is taken for it."""
    is_mounted, image = (yield from _is_mounted(asked)), asked.image
    ref = None if is_mounted else asked.ref()
    if image.format == SAVE_AS:
        return ref.source if ref else f"{asked.directory}/{asked.token}"
    format = asked.format
    if ref and image.format not in ("", ref.format):
        raise BadAttribute(f"FORMAT of image {image.id} is {image.format!r}; images on Ceph are {ref.format}")
    if not ref and format not in images.STORED:
        raise BadAttribute(f"FORMAT of image {image.id} is {format!r}, not one of {', '.join(images.STORED)}")
    fs = image.file_system or image.attribute("FS").lower()
    if fs and fs not in asked.file_systems:
        raise BadAttribute(f"FS of image {image.id} is {fs!r}, not one of {', '.join(sorted(asked.file_systems))}")
    if not 0 < image.size <= asked.max_size:
        raise BadAttribute(f"SIZE of image {image.id} is {image.size // MiB} MiB; 1 to {asked.max_size // MiB} are possible")
    if ref:
        from ..model.steps_image import CreateImage

        yield On(asked.bridge, (CreateImage(ref, image.size, fs),))
        return ref.source
    return str((yield Here(f.MakeFile(asked.directory, format, image.size, fs))))


def clone(asked: Asked) -> Part[str]:
    """Plan clone: copy another image (PATH is its SOURCE) into the datastore; SOURCE and FORMAT."""
    if (yield from _is_mounted(asked)):
        stored = yield Here(f.CopyStoredFile(absolute(asked.image.path, "PATH"), asked.directory, asked.format))
        return f"{stored} {asked.format}"
    from ..model.steps_image import CopyStored

    ref = asked.ref()
    source = stores.check_source(ref.access, asked.image.path, "PATH")
    yield On(asked.bridge, (CopyStored(ref, source, -1, running=False),))
    return f"{ref.source} {ref.format}"


def rm(asked: Asked) -> Part[str]:
    """Plan rm: remove the image SOURCE; one that is not there is removed already."""
    is_mounted = yield from _is_mounted(asked)
    if not asked.image.source:
        return ""
    if is_mounted:
        yield Here(f.RemoveStored(asked.path))
    else:
        from ..model.steps_image import RemoveImage

        yield On(asked.bridge, (RemoveImage(asked.ref(asked.image.source)),))
    return ""


def snap_delete(asked: Asked) -> Part[str]:
    """Plan snap_delete: remove the image's TARGET_SNAPSHOT; one that is not there is removed already."""
    if (yield from _is_mounted(asked)):
        yield Here(f.DropSnapshot(asked.path, asked.format, _snapshot(asked)))
    else:
        from ..model.steps_image import ForgetSnapshot

        yield On(asked.bridge, (ForgetSnapshot(asked.ref(asked.image.source), _snapshot(asked)),))
    return ""


def snap_revert(asked: Asked) -> Part[str]:
    """Plan snap_revert: make the image's TARGET_SNAPSHOT its content; all snapshots stay."""
    if (yield from _is_mounted(asked)):
        yield Here(f.RevertStored(asked.path, asked.format, _snapshot(asked), asked.image.size))
    else:
        from ..model.steps_image import RevertImage

        yield On(asked.bridge, (RevertImage(asked.ref(asked.image.source), _snapshot(asked), asked.image.size),))
    return ""


def snap_flatten(asked: Asked) -> Part[str]:
    """Plan snap_flatten: make the image's TARGET_SNAPSHOT its content and remove all snapshots; without any it is done already."""
    if (yield from _is_mounted(asked)):
        yield Here(f.FlattenStored(asked.path, asked.format, _snapshot(asked), asked.image.size))
    else:
        from ..model.steps_image import FlattenImage

        yield On(asked.bridge, (FlattenImage(asked.ref(asked.image.source), _snapshot(asked), asked.image.size),))
    return ""


def _snapshot(asked: Asked) -> int:
    return number(asked.image.text("TARGET_SNAPSHOT"), "TARGET_SNAPSHOT")


def export(asked: Asked) -> Part[str]:
    """Plan export: IMPORT_INFO for the marketplace; SOURCE is what OpenNebula's downloader reads, here or by ssh from the bridge."""
    from xml.sax.saxutils import escape

    if (yield from _is_mounted(asked)):
        source, format = asked.path, asked.format
        digest = yield Here(f.DigestStored(source, format, "md5"))
    else:
        from ..model.steps_image import DigestImage

        image, bridge = asked.ref(asked.image.source), asked.bridge
        (found,) = yield On(bridge, (DigestImage(image, "md5"),))
        conf = f"&CEPH_CONF={image.access.conf}" if image.access.conf else ""
        host = asked.node if bridge == "localhost" else bridge
        source, format, digest = f"rbd://{host}/{image.source}?CEPH_USER={image.access.bridge_user}{conf}", image.format, found["digest"]
    facts = {"IMPORT_SOURCE": source, "MD5": digest, "SIZE": str(asked.image.size // MiB), "FORMAT": format, "DISPOSE": "NO"}
    return f"<IMPORT_INFO>{''.join(f'<{name}>{escape(text)}</{name}>' for name, text in facts.items())}</IMPORT_INFO>"


def monitor(asked: Asked) -> Part[str]:
    """Plan monitor: the capacity of the store in MiB; a pool's as Ceph has it: replicas taken off, quotas kept."""
    if (yield from _is_mounted(asked)):
        if not asked.access.marker:
            yield Here(f.MakeStore(asked.directory))
        found = yield Here(f.MeasureStore(asked.directory))
    else:
        from ..model.steps_image import MeasurePool

        (found,) = yield On(asked.bridge, (MeasurePool(asked.access, stores.pool(asked.datastore)),))
    return f"USED_MB={found['used'] // MiB}\nTOTAL_MB={found['total'] // MiB}\nFREE_MB={found['free'] // MiB}"


PLANNERS = {planner.__name__: planner for planner in (
    stat, cp, mkfs, clone, rm, monitor, snap_delete, snap_revert, snap_flatten, export,
)}  # fmt: skip
