# SPDX-License-Identifier: Apache-2.0
"""The part of `semishared setup` that marks stores: who finds the marker of a datastore in its directory has its store there.

A marker below a mount point would be worse than none. So a directory is marked where the images that oned knows are in it;
for a datastore without any, where something is mounted, or where the operator says that this is the store itself.
"""

from __future__ import annotations

import os
import re
from typing import Iterable, NamedTuple, Sequence

from ..errors import SemisharedError
from ..install.preflight import mount_of
from ..model import stores
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore, Image
from ..store import marker

SETTLED = (1, 2, 3, 6, 8)
"""States in which an image is in its store: READY, USED, DISABLED, CLONE, USED_PERS (include/Image.h)."""
SHARED_TYPES = re.compile(r"(nfs4?|ceph|lustre|gpfs|beegfs|glusterfs|gfs2|ocfs2|9p|virtiofs|fuse\..*)\Z")
MOUNTS = "/proc/self/mountinfo"


class Marked(NamedTuple):
    """What was done about the marker of a datastore."""

    store: str = ""
    """Its id; '' if it has none now."""
    why_not: str = ""


def cloud_of(datastores: Iterable[Datastore]) -> str:
    """Return the id that datastores of ours have of their cloud, a new one if none has any."""
    found = sorted({store.attribute("SEMISHARED_CLOUD") for store in datastores} - {""})
    return found[0] if found else os.urandom(16).hex()


def mark(oned: Oned, datastore: Datastore, others: Sequence[Datastore], images: Iterable[Image], is_store: bool) -> Marked:
    """Mark the store of a datastore, and say to oned whose it is; `is_store`: the operator says that it is in its place.

    Raise SemisharedError if it is another datastore's, or oned refuses.
    """
    access = stores.access(datastore)
    attributes = {} if access.cloud else {"SEMISHARED_CLOUD": cloud_of([datastore, *others])}
    marked = Marked()
    if access.can.is_mounted:
        directory = absolute(datastore.base_path, "BASE_PATH")
        sources = [image.source for image in images if image.store_id == datastore.id and image.number("STATE") in SETTLED]
        marked = _mark(directory, access.marker, others, sources, is_store)
        if marked.store != access.marker:
            attributes["SEMISHARED_STORE"] = marked.store
    if attributes:
        oned.update_datastore(datastore.id, "".join(f'{name} = "{value}"\n' for name, value in attributes.items()))
    return marked


def _mark(directory: str, wanted: str, others: Sequence[Datastore], sources: Sequence[str], is_store: bool) -> Marked:
    found = marker.read(directory)
    taken = [other for other in others if found and other.attribute("SEMISHARED_STORE") == found]
    if taken:
        raise SemisharedError(f"{directory} holds the store of datastore {taken[0].id} ({taken[0].name})")
    if found and wanted:
        marker.check(directory, wanted)
        return Marked(wanted)
    why_not = _doubt(directory, sources, is_store or bool(found))
    if why_not:
        return Marked(wanted, why_not)
    store = found or wanted or os.urandom(16).hex()
    if not found:
        marker.write(directory, store)
    return Marked(store)


def _doubt(directory: str, sources: Sequence[str], is_store: bool) -> str:
    """Return why the directory might not be the store, '' if it is."""
    if not os.path.isdir(directory):
        return f"{directory} is not there"
    missing = [source for source in sources if not _is_there(source)]
    if missing:
        return f"{len(missing)} of {len(sources)} images are not in it, e.g. {missing[0]}"
    if not sources and not is_store and not is_mount(directory):
        return f"nothing is mounted at {directory}"
    return ""


def _is_there(source: str) -> bool:
    try:
        # Opened: only looking at it would ask nobody but a cache.
        os.close(os.open(source, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def is_mount(directory: str, mounts: str = MOUNTS) -> bool:
    """Tell whether something is mounted for this directory or for all datastores, or it lies on a shared file system."""
    with open(mounts, encoding="utf-8", errors="surrogateescape") as file:
        mount = mount_of(os.path.realpath(directory), file.read())
    above = {os.path.realpath(path) for path in (directory, os.path.dirname(directory))} - {"/"}
    return mount.get("point") in above or bool(SHARED_TYPES.match(str(mount.get("type"))))
