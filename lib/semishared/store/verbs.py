# SPDX-License-Identifier: Apache-2.0
"""Steps on images that name a verb of their store (model/store/image_steps.py), on whatever machine.

The fields of such a step are the arguments of its verb; an Access in front says which store it is, where no
image does.
"""

from __future__ import annotations

from typing import Any

from . import bridged, of

VERBS = {
    "BeginChange": "begin_change",
    "CheckStore": "reach",
    "CheckWriters": "writers",
    "CloneStored": "clone_for",
    "CopyHeld": "copy_held",
    "CopyStored": "copy",
    "CreateImage": "create",
    "DigestImage": "digest",
    "DropSnapshot": "drop_snapshot",
    "EndChange": "end_change",
    "FindClone": "clone_found",
    "FindSnapshots": "passing",
    "FlattenImage": "flatten",
    "ForgetSnapshot": "forget",
    "FreezeImage": "freeze",
    "GrowImage": "grow",
    "HoldMoment": "hold",
    "KeepSnapshot": "keep",
    "LendContent": "lend",
    "ListPool": "names",
    "LookAtImages": "describe",
    "MeasureStore": "capacity",
    "NameGeneration": "name",
    "NoteEpoch": "note_epoch",
    "PublishImage": "show",
    "RemoveImage": "remove",
    "RevertImage": "revert",
    "SeeImage": "look",
    "SeeSession": "session",
    "SettleImage": "settle",
    "StageImage": "stage",
    "TakeBackClone": "take_back",
}
OF_DISKS = ("BeginChange", "ForgetSnapshot", "GrowImage", "KeepSnapshot", "RemoveImage", "RevertImage")
"""Those that an action on a VM's disk comes to: the image may be its clone, and of a VM that was made
anew.
"""


def do(step: Any, seq: int = -1) -> Any:
    """Carry out a step of a plan of that SEQ of its VM's history; return what its verb does. Raise
    LateAction.
    """
    name = type(step).__name__
    if hasattr(step, "image"):
        at = of(step.image.access)
        if seq >= 0 and name in OF_DISKS and step.image.access.can.has_bridge:
            bridged(step.image.access).refuse_late(step.image.source, seq)
        return getattr(at, VERBS[name])(*step, *([seq] if name == "CloneStored" else ()))
    return getattr(of(step.access), VERBS[type(step).__name__])(*step[1:])
