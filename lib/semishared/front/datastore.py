# SPDX-License-Identifier: Apache-2.0
"""The datastore actions: argv is an id, stdin is DS_DRIVER_ACTION_DATA, stdout is the answer.

docs/explanation/contract.md has the contract, and plan/store/datastore.py plans them.
"""

from __future__ import annotations

import os
import sys
from typing import Mapping, Tuple

from .. import table
from ..errors import BadArguments, BadAttribute, OnedUnavailable, StoreAbsent
from ..model.disk import names as disk_names
from ..model.exchange import Part
from ..model.store import dir_names, template
from ..named import NamedTuple
from ..opennebula.args import Subject
from ..opennebula.report import Report
from ..opennebula.xml import Datastore, DriverData, Image
from ..plan.store import datastore as plans
from ..tools import locks, progress
from ..units import GiB
from .action import Action, carry_out

ACTIONS = plans.ACTIONS


class Work(NamedTuple):
    """One action, for the steps that the front-end carries out itself (table.py)."""

    action: Action
    asked: plans.Asked


def refuse_mount_point(directory: str, store: int, removed: str) -> None:
    """Raise StoreAbsent if a directory has no image and nothing of ours, but OpenNebula has images there."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        names = []
    if any(name == disk_names.SIDE or dir_names.is_image(name) for name in names):
        return
    known = int(dir_names.is_image(os.path.basename(removed)))
    if not known and store >= 0:
        known = _settled(store)
    if known:
        what = (
            f"OpenNebula has {known} image{'s' * (known > 1)} of datastore {store} there, and there is none"
        )
        raise StoreAbsent(
            f"{directory} on {os.uname().nodename} is where its store is to be mounted, or was: {what}"
        )


def _settled(store: int) -> int:
    """Return how many images of a datastore were made; oned is asked only where that is in doubt."""
    from ..opennebula.oned import Oned
    from .stores import SETTLED

    try:
        return sum(image.store_id == store and image.state in SETTLED for image in Oned().images())
    except OnedUnavailable:
        return 0


def _noted(action: str, datastore: Datastore) -> None:
    """Have what a datastore says noted while it is monitored; raise LostAttributes if it lacks some of it."""
    is_whole = template.is_whole(datastore)
    if action != plans.monitor.__name__ and is_whole:
        return
    from . import noted_datastores

    if is_whole:
        noted_datastores.note(datastore)
    else:
        noted_datastores.whole(datastore)


def planned(action: Action) -> Part[str]:
    """Return the plan of a datastore action, which returns what goes to stdout."""
    if not action.argv:
        raise BadArguments("no id")
    progress.limit_s = action.config.hosts_standstill_timeout_s
    data, most = DriverData(sys.stdin.buffer.read()), action.config.images_max_virtual_size_gib * GiB
    action.report.subject = lambda: _subject(data)
    locks.say = action.report.warn
    asked = plans.Asked(
        data.image,
        _with_configured(action, data.datastore),
        most,
        _file_systems(action, data.image),
        os.urandom(16).hex(),
        os.uname().nodename,
        from_bridges=data.has_source_bridges,
    )
    _noted(action.name, data.datastore)
    work = Work(action, asked)
    action.here = lambda step: table.carry_out(step, work)
    return plans.planned(action.name, asked)


def _subject(data: DriverData) -> Subject:
    """Return what an action is about: an image, or a datastore where the image has no id yet."""
    image, datastore = data.image, data.datastore
    store, own = f"datastore {datastore.id}", f"image {image.id}"
    named = ((datastore.base_path, store), (image.source, own))
    names = {os.path.normpath(path): what for path, what in named if path}
    return Subject(store if image.id < 0 else own, names=names)


def _with_configured(action: Action, datastore: Datastore) -> Datastore:
    """Return a datastore with what the site's files say of its kind; raise BadAttribute if they disagree."""
    if datastore.attribute("DISK_TYPE") != "RBD":
        return datastore
    from . import stock_conf

    why = stock_conf.other_pool(datastore) if action.name in plans.MAKE else ""
    if why:
        raise BadAttribute(why)
    return stock_conf.filled(datastore)


def _file_systems(action: Action, image: Image) -> Mapping[str, Tuple[str, ...]]:
    """Return what mkfs may be asked for; the site's file is read only where it is asked for one."""
    if action.name != plans.mkfs.__name__ or not (image.file_system or image.attribute("FS")):
        return {}
    from . import stock_conf

    return stock_conf.file_systems()


def act(action: str, argv: list[str], report: Report) -> str:
    """Carry out a datastore action and return what goes to stdout."""
    under_way = Action(action, argv, report)
    under_way.moved.append(progress.moved)  # of what the front-end does itself
    with under_way.counted("datastore"):
        return carry_out(planned(under_way), under_way)
