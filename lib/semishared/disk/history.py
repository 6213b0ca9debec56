# SPDX-License-Identifier: Apache-2.0
"""The SEQ of a VM directory, as vm_dir.py notes it. Every start reads it, so nothing else is loaded."""

from __future__ import annotations

import json
import os

from ..model.disk import names as disk_names

UNKNOWN = -1
"""Stands for a SEQ."""


def seq_of(vm_dir: str) -> int:
    """Return the SEQ noted in a VM directory, UNKNOWN without a note."""
    try:
        with open(
            os.open(
                disk_names.history_note(vm_dir), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            ),
            "rb",
        ) as file:
            found = json.loads(file.read(4096)).get("seq")
    except (OSError, ValueError, AttributeError, RecursionError):
        return UNKNOWN
    return found if isinstance(found, int) else UNKNOWN


def check(vm_dir: str) -> None:
    """Raise UnknownHistory if a VM directory has a note without a SEQ; directories of 0.1.0 have no note."""
    path = disk_names.history_note(vm_dir)
    try:
        os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as e:
        if isinstance(e, NotADirectoryError) and not os.path.isdir(vm_dir):
            return  # a file lies in the place of the directory: no history
        # Other errors are reported below.
    from ..errors import BadRecord, UnknownHistory
    from ..tools import files

    try:
        data = files.read_json(path) or {"seq": UNKNOWN}
        why = (
            ""
            if isinstance(data.get("seq"), int)
            else f"{path} on {os.uname().nodename} is damaged: it says no SEQ"
        )
    except BadRecord as e:
        why = e.detail
    if why:
        raise UnknownHistory(why)


def refuse_late(vm: int, vm_dir: str, seq: int) -> None:
    """Raise LateAction if the VM was made or brought here at a SEQ above `seq`, the plan's."""
    own = seq_of(vm_dir) if seq >= 0 else UNKNOWN
    if own == UNKNOWN and seq >= 0:
        check(vm_dir)
    if seq < own:
        from ..errors import LateAction

        here = os.uname().nodename
        raise LateAction(
            f"{vm_dir} on {here} is of SEQ {own} of VM {vm}'s history, and this is of SEQ {seq}: "
            f"it is left as it is"
        )
