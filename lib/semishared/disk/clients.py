# SPDX-License-Identifier: Apache-2.0
"""The note of which shares of a VM its guest mounts itself, and of the other shares' roots.

Each boot writes it anew; deploy reads it (vmm/records.py).
"""

from __future__ import annotations

import os

from ..model.share import names as share_names
from ..model.steps import NoteClients
from ..tools import files
from ..tools.effects import point
from . import vm_dir
from .epochs import Planned

VERSION = 1


def note(step: NoteClients, planned: Planned) -> None:
    """Write the disks and the roots of shares; remove the note if there are none."""
    path = share_names.clients(step.vm_dir)
    with vm_dir.publishing(step.vm, step.vm_dir, planned), files.enough_space(step.vm_dir):
        files.remove_staged(*os.path.split(path))
        if step.disks or step.roots:
            files.write_json(path, {"version": VERSION, "disks": list(step.disks), "roots": step.roots})
        else:
            files.unlink(path)
        point("clients noted")
