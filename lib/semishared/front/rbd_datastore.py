# SPDX-License-Identifier: Apache-2.0
"""The datastore actions for images that are reached over the network: decided here, done on the bridge in one session.

Uploads are read, checked and converted on the front-end, in BASE_PATH; to the bridge go extents, which it writes straight
into the new image. Nothing of an image is ever staged on the bridge.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Iterable

from ..errors import BadAttribute, RestrictedPath
from ..model import steps as s
from ..model import steps_image as i
from ..model import stores
from ..opennebula.args import number
from ..plan import images
from ..store import dir_upload
from ..tools import extents
from ..tools.mkfs import MKFS
from ..units import MiB, human

if TYPE_CHECKING:
    from .datastore import Request

FORMAT = "raw"


def _image(request: Request, source: str = "") -> s.ImageRef:
    """Return the image the action is about: the one that `source` names, else the new one of this id."""
    datastore, image = request.datastore, request.image
    access, pool = stores.access(datastore), stores.pool(datastore)
    found = images.ref_at(datastore.id, access, image.id, source or f"{pool}/one-{image.id}")
    if stores.pool_and_name(found.source)[0] != pool:
        raise RestrictedPath(f"{found.source} is no image of datastore {datastore.id}, whose pool is {pool}")
    return found


def _on_bridge(request: Request, steps: Iterable[s.Step]) -> list[Any]:
    from ..wire.session import Session

    bridge = stores.bridge(request.datastore, max(request.image.id, 0))
    with Session(bridge, "datastore", request.config) as session:
        return session.run(steps)


def cp(request: Request) -> str:
    """Bring the image at PATH into the datastore; print SOURCE and FORMAT."""
    from .datastore import bring, judge

    source, image = request.source, _image(request)
    if source.is_url:
        request.check_allowed_url(source)
    # No store: where the front-end works on uploads, which nobody else has made.
    os.makedirs(request.directory, exist_ok=True)
    with dir_upload.uploading(request.directory) as up:
        kept = bring(request, source, up)
        found = judge(request, source, kept)
        sent = send(request, dir_upload.convert(kept.path, found, FORMAT, up), image)
    request.report.info(f"{source.path} stored as {image.source} ({human(sent)} of data)")
    return f"{image.source} {FORMAT}"


def send(request: Request, path: str, image: s.ImageRef) -> int:
    """Have the raw file `path` published as `image`; return the bytes that crossed."""
    from ..wire.session import Session

    bridge, sent = stores.bridge(request.datastore, request.image.id), 0
    with open(path, "rb") as file, Session(bridge, "cp", request.config, bulk=True) as session:
        size = os.fstat(file.fileno()).st_size
        made = extents.Copy(None, size)
        session.begin([i.ReceiveImage(image, size)])
        for index, content in extents.data(file.fileno(), size):
            if extents.is_zero(content):
                continue
            made.add(index, content)
            session.send(extent=index)
            session.send_data(content)
            sent += len(content)
        session.send(end=True, sha256=made.manifest(FORMAT).generation)
        session.finish()
    return sent


def mkfs(request: Request) -> str:
    """Create an empty image; print SOURCE alone, the whole line is taken for it."""
    from .datastore import SAVE_AS

    image, ref = request.image, _image(request)
    if image.format == SAVE_AS:
        return ref.source
    if image.format not in ("", FORMAT):
        raise BadAttribute(f"FORMAT of image {image.id} is {image.format!r}; images on Ceph are {FORMAT}")
    fs = image.file_system or image.attribute("FS").lower()
    if fs and fs not in MKFS:
        raise BadAttribute(f"FS of image {image.id} is {fs!r}, not one of {', '.join(sorted(MKFS))}")
    if not 0 < image.size <= request.max_size:
        raise BadAttribute(f"SIZE of image {image.id} is {image.size // MiB} MiB; 1 to {request.max_size // MiB} are possible")
    _on_bridge(request, [i.CreateImage(ref, image.size, fs)])
    return ref.source


def clone(request: Request) -> str:
    """Copy another image (PATH is its SOURCE) of the same cluster into the datastore; print SOURCE and FORMAT."""
    ref = _image(request)
    source = stores.check_source(ref.access, request.image.path, "PATH")
    _on_bridge(request, [i.CopyStored(ref, source, -1, running=False)])
    return f"{ref.source} {FORMAT}"


def rm(request: Request) -> str:
    """Remove the image SOURCE; one that is not there is removed already."""
    if request.image.source:
        _on_bridge(request, [i.RemoveImage(_image(request, request.image.source))])
    return ""


def _snapshot(request: Request) -> tuple[s.ImageRef, int]:
    return _image(request, request.image.source), number(request.image.text("TARGET_SNAPSHOT"), "TARGET_SNAPSHOT")


def snap_delete(request: Request) -> str:
    """Remove the image's TARGET_SNAPSHOT; one that is not there is removed already."""
    _on_bridge(request, [i.ForgetSnapshot(*_snapshot(request))])
    return ""


def snap_revert(request: Request) -> str:
    """Make the image's TARGET_SNAPSHOT its content; all snapshots stay."""
    _on_bridge(request, [i.RevertImage(*_snapshot(request), request.image.size)])
    return ""


def snap_flatten(request: Request) -> str:
    """Make the image's TARGET_SNAPSHOT its content and remove all snapshots; without any it is done already."""
    _on_bridge(request, [i.FlattenImage(*_snapshot(request), request.image.size)])
    return ""


def export(request: Request) -> str:
    """Print IMPORT_INFO for the marketplace: SOURCE is what OpenNebula's downloader reads from the bridge by ssh."""
    from xml.sax.saxutils import escape

    image = _image(request, request.image.source)
    (digest,) = _on_bridge(request, [i.DigestImage(image, "md5")])
    bridge = stores.bridge(request.datastore, image.id)
    conf = f"&CEPH_CONF={image.access.conf}" if image.access.conf else ""
    host = os.uname().nodename if bridge == "localhost" else bridge
    facts = {
        "IMPORT_SOURCE": f"rbd://{host}/{image.source}?CEPH_USER={image.access.bridge_user}{conf}", "MD5": digest["digest"],
        "SIZE": str(request.image.size // MiB), "FORMAT": FORMAT, "DISPOSE": "NO",
    }  # fmt: skip
    return f"<IMPORT_INFO>{''.join(f'<{name}>{escape(text)}</{name}>' for name, text in facts.items())}</IMPORT_INFO>"


def monitor(request: Request) -> str:
    """Print the capacity of the pool in MiB, as Ceph has it: replicas taken off, quotas kept."""
    datastore = request.datastore
    (found,) = _on_bridge(request, [i.MeasurePool(stores.access(datastore), stores.pool(datastore))])
    used, total, free = found["used"], found["total"], found["free"]
    return f"USED_MB={used // MiB}\nTOTAL_MB={total // MiB}\nFREE_MB={free // MiB}"


ACTIONS = {"cp": cp, "mkfs": mkfs, "clone": clone, "rm": rm, "monitor": monitor,
           "snap_delete": snap_delete, "snap_revert": snap_revert, "snap_flatten": snap_flatten, "export": export}  # fmt: skip
