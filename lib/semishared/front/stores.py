# SPDX-License-Identifier: Apache-2.0
"""Stores that the front-end mounts, apart from actions: `setup` marks them, `doctor` looks into them.

A machine that finds the marker of a datastore in its directory has the store there. A marker below a mount
point would be worse than none. So a directory is marked where the images that oned knows are in it; for a
datastore without any, where something is mounted, or where the administrator says that this is the store
itself.
"""

from __future__ import annotations

import os
from typing import Callable, Iterable, Sequence

from ..errors import HostUnreachable, SemisharedError, StoreAbsent
from ..model.attributes import CLOUD, FS_ROOT, STORE
from ..model.store import access as store_access
from ..model.store import template
from ..named import NamedTuple
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.states import ImageState as State
from ..opennebula.xml import Datastore, Image
from ..store.dir import marker, snapshots
from ..wire.session import first_answer

SETTLED = (State.READY, State.USED, State.DISABLED, State.CLONE, State.USED_PERS)
"""States in which an image is in its store."""


class Marked(NamedTuple):
    """The result of marking a datastore's store."""

    store: str = ""
    """The marker's id; '' if the store has none now."""
    why_not: str = ""


def roots() -> list[str]:
    """Return the directories of all datastores, by oned."""
    found = {path for one in Oned().datastores() for path in (one.base_path, FS_ROOT.text(one))}
    return sorted(path for path in found if path.startswith("/"))


def cloud_of(datastores: Iterable[Datastore]) -> str:
    """Return the cloud id in our datastores, a new one if none has any."""
    found = sorted({CLOUD.text(store) for store in datastores} - {""})
    return found[0] if found else os.urandom(16).hex()


def mark(
    oned: Oned,
    datastore: Datastore,
    others: Sequence[Datastore],
    images: Iterable[Image],
    is_store: bool,
    is_mount: Callable[[str], bool] = marker.is_mount,
) -> Marked:
    """Mark the store of a datastore and tell oned; raise SemisharedError if it is another's, or oned refuses.

    A directory without images is a store by the administrator's word, `is_store`, or where `is_mount` says so
    of the front-end; a bridge looks at its own mounts.
    """
    access = template.access(datastore)
    lines = "" if access.cloud else CLOUD.line(cloud_of([datastore, *others]))
    marked = Marked()
    if not template.machine(datastore, 0):
        directory = absolute(datastore.base_path, "BASE_PATH")
        sources = [
            image.source for image in images if image.store_id == datastore.id and image.state in SETTLED
        ]
        if template.bridges(datastore):
            marked = _mark_at_bridge(datastore, directory, others, sources, is_store)
        else:
            marked = _mark(directory, access.marker, others, sources, lambda path: is_store or is_mount(path))
        if marked.store != access.marker:
            lines += STORE.line(marked.store)
    if lines:
        oned.update_datastore(datastore.id, lines)
    return marked


def _mark_at_bridge(
    datastore: Datastore,
    directory: str,
    others: Sequence[Datastore],
    sources: Sequence[str],
    is_store: bool,
) -> Marked:
    """Have the first bridge that answers mark a store that the front-end need not mount."""
    from ..model.store.datastore_steps import MarkStore
    from ..opennebula.report import Report
    from .action import Action

    wanted = STORE.text(datastore)
    step = MarkStore(directory, wanted or os.urandom(16).hex(), tuple(sources), is_store)

    def ask(bridge: str) -> tuple[str, object]:
        with Action("setup", [], Report("setup")).session(bridge) as session:
            return bridge, session.run([step])[0]

    try:
        bridge, found = first_answer(template.bridges(datastore), ask)
    except StoreAbsent as e:
        return Marked(wanted, e.detail)
    except HostUnreachable as e:
        return Marked(wanted, f"no bridge of datastore {datastore.id} answers: {e.detail}")
    found = STORE.parsed(str(found), bridge)
    taken = [other for other in others if STORE.text(other) == found]
    if taken or wanted not in ("", found):
        whose = f"that of datastore {taken[0].id} ({taken[0].name})" if taken else f"another one, {found}"
        raise SemisharedError(f"the store at {directory} on {bridge} is {whose}")
    return Marked(found)


def _mark(
    directory: str,
    wanted: str,
    others: Sequence[Datastore],
    sources: Sequence[str],
    is_store: Callable[[str], bool],
) -> Marked:
    found = marker.read(directory)
    taken = [other for other in others if found and STORE.text(other) == found]
    if taken:
        raise SemisharedError(f"{directory} holds the store of datastore {taken[0].id} ({taken[0].name})")
    if found and wanted:
        marker.check(directory, wanted)
        return Marked(wanted)
    why_not = marker.doubt(directory, sources, lambda path: bool(found) or is_store(path))
    if why_not:
        return Marked(wanted, why_not)
    store = found or wanted or os.urandom(16).hex()
    if not found:
        marker.write(directory, store)
    return Marked(store)


def is_stock(image: Image) -> bool:
    """Tell whether an image is in a stock driver's layers; raise OSError or SemisharedError if unreadable."""
    return store_access.is_path(image.source) and snapshots.is_layered(image.source, image.format)
