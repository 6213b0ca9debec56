# SPDX-License-Identifier: Apache-2.0
"""`semishared doctor --fix`: show which attributes datastores of ours have lost, and put them back.

The front-end's notes say what was there (front/noted_datastores.py), oned the DISK_TYPE, a store its marker.
"""

from __future__ import annotations

import argparse
from typing import Mapping, Sequence

from ..errors import SemisharedError
from ..front import noted_datastores
from ..front.stores import mark
from ..install.oned_conf import quoted
from ..model.attributes import STORE
from ..opennebula.oned import Oned
from ..opennebula.report import printable
from ..opennebula.xml import Datastore
from . import command as on
from .command import put, warn


def lost_attributes(datastores: Sequence[Datastore]) -> list[tuple[Datastore, Mapping[str, str]]]:
    """Return the datastores that have lost attributes, and which; raise BadRecord for a damaged note."""
    found = [(store, noted_datastores.lost(store)) for store in datastores]
    return [(store, lost) for store, lost in found if lost]


def put_back(arguments: argparse.Namespace) -> bool:
    """Show what was lost, and put it back with the administrator's consent; tell whether all is there now.

    Raise OnedUnavailable, BadRecord.
    """
    oned = on.administrator()
    datastores = on.ours(oned.datastores())
    found = lost_attributes(datastores)
    said = [f"datastore {store.id} ({store.name}): {line}" for store, lost in found for line in _lines(lost)]
    if not found:
        return True
    if arguments.dry_run or not on.is_asked(arguments):
        does = "would be" if arguments.dry_run else "is"
        for line in said:
            (warn if arguments.json else put)(f"{line}: {does} put back")
    if arguments.dry_run or not on.agreed(arguments, said):
        return False
    is_well = True
    for store, lost in found:
        try:
            _restore(oned, store, lost, [other for other in datastores if other.id != store.id])
        except SemisharedError as e:
            warn(f"datastore {store.id}: {printable(e.line())}")
            is_well = False
    return is_well


def _lines(lost: Mapping[str, str]) -> list[str]:
    return [f"{name} = {quoted(value)}" for name, value in sorted(lost.items())]


def _restore(oned: Oned, store: Datastore, lost: Mapping[str, str], others: Sequence[Datastore]) -> None:
    """Put back what was lost; a marker that no note has is taken if the images are beside it."""
    known = noted_datastores.noted(store)
    sure = {name: value for name, value in lost.items() if name != STORE.name or name in known}
    oned.update_datastore(store.id, "".join(f"{line}\n" for line in _lines(sure)))
    if len(sure) < len(lost):
        images = [image for image in oned.images() if image.store_id == store.id]
        marked = mark(oned, oned.datastore(store.id), others, images, False, lambda path: False)
        if marked.why_not:
            raise SemisharedError(marked.why_not)
    noted_datastores.note(oned.datastore(store.id))
