# SPDX-License-Identifier: Apache-2.0
"""Steps on images (model/steps_image.py) that name a verb of their store: carried out alike wherever the store is changed.

The fields of such a step are the arguments of its verb; an Access in front says which store it is, where no image does.
"""

from __future__ import annotations

from typing import Any

from . import of

VERBS = {
    "BeginChange": "begin_change",
    "CheckStore": "reach",
    "CheckWriters": "writers",
    "CloneStored": "clone",
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
    "SettleImage": "settle",
    "StageImage": "stage",
}


def do(step: Any) -> Any:
    """Carry out a step; return what its verb does."""
    if hasattr(step, "image"):
        return getattr(of(step.image.access), VERBS[type(step).__name__])(*step)
    return getattr(of(step.access), VERBS[type(step).__name__])(*step[1:])
