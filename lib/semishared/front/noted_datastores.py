# SPDX-License-Identifier: Apache-2.0
"""A second witness of what datastores say: notes on the front-end, beside one_auth.

    semishared_datastores/<datastore>      {"version": 1, "attributes": {NAME: VALUE, ...}}

What a template says is noted while it is whole (model/store/lost.py): by the monitoring of an image
datastore, which those for systems do not have, by `setup`, and by what the timer starts: `publish` if a VM
has changed, and `detach --due`. An action on a datastore that has lost some is right all the same, or it is
refused at its start.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Dict, Iterable

from .. import NAME
from ..errors import LostAttributes, SemisharedError
from ..model.attributes import STORE
from ..model.store import lost as rows
from ..model.store import template
from ..opennebula.args import absolute
from ..opennebula.xml import Datastore
from ..tools import files

VERSION = 1


def _directory() -> str:
    auth = os.environ.get("ONE_AUTH") or os.path.expanduser("~/.one/one_auth")
    return os.path.join(os.path.dirname(os.path.abspath(auth)), "semishared_datastores")


def path_of(datastore: Datastore) -> str:
    """Return where a datastore's note lies."""
    return f"{_directory()}/{datastore.id}"


def note_all(datastores: Iterable[Datastore]) -> None:
    """Note those that have one of our drivers."""
    for datastore in datastores:
        if NAME in (datastore.driver, datastore.text("DS_MAD")):
            note(datastore)


def note(datastore: Datastore) -> None:
    """Note what a whole template says, if that is new; a front-end that cannot write fails nothing by it."""
    if not template.is_whole(datastore) or datastore.id < 0:
        return
    data = {"version": VERSION, "attributes": rows.to_note(datastore.attributes())}
    path = path_of(datastore)
    if files.hint(path) == data:
        return
    with suppress(SemisharedError, OSError):
        os.makedirs(_directory(), 0o700, exist_ok=True)
        files.write_json(path, data)


def noted(datastore: Datastore) -> Dict[str, str]:
    """Return what was noted of a datastore, {} for nothing; raise BadRecord if that cannot be read."""
    found = (files.read_json(path_of(datastore)) or {}).get("attributes")
    items = found.items() if isinstance(found, dict) else ()
    return {str(name): str(value) for name, value in items if rows.is_name(str(name))}


def lost(datastore: Datastore) -> Dict[str, str]:
    """Return what a datastore has lost: by its note, and its store's marker; raise BadRecord."""
    if template.is_whole(datastore):
        return {}
    found = rows.lost(datastore, noted(datastore))
    if STORE.name not in found and not datastore.is_system and template.unmarked(datastore):
        marker = _marker(datastore)
        if marker:
            found[STORE.name] = marker
    return found


def _marker(datastore: Datastore) -> str:
    """Return the id of the store in the datastore's directory, '' if none is seen."""
    from ..store.dir import marker
    from ..tools.hung_store import unless_it_hangs

    def look() -> str:
        try:
            return marker.read(absolute(datastore.base_path, "BASE_PATH"))
        except SemisharedError:
            return ""  # what is wrong there the action itself says

    return unless_it_hangs(look, "")


def whole(datastore: Datastore) -> Datastore:
    """Return a datastore that still says which store is its own; raise LostAttributes, BadRecord."""
    gone = [] if template.is_whole(datastore) else sorted({*lost(datastore)} & {*rows.WHICH})
    if gone:
        raise LostAttributes(f"datastore {datastore.id} has lost {', '.join(gone)}, as by Update in Sunstone")
    return datastore
