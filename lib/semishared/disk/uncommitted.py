# SPDX-License-Identifier: Apache-2.0
"""What of a diff its image has not been given yet: told by its record, and by the headers of its layers,
which witness for one another.
"""

from __future__ import annotations

import os

from ..errors import DamagedLayer
from ..model import layout, layout_delta
from ..model.record import Record
from ..tools import beneath, files, layers


def chain(record: Record) -> list[str]:
    """Return the layers of a diff, the lowest first: all of them, or none if they are not there, or on a
    device that is away.

    Raise DamagedLayer if one is not there that is named by the record or by the one over it, or if that does
    not say what it lies over.
    """
    folder, number = os.path.dirname(record.path), layout.layer_of(record.path)
    found: list[str] = []
    here = os.uname().nodename
    try:
        # Who has it open sees all of it, also if its device is put aside meanwhile (base/hung.py).
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        while number:
            below = layers.backing_of(f"{beneath.path_of(fd)}/{number}")[0]
            if not (layout.is_number(below) or below.startswith(("/", "json:"))):
                # Nothing, or what no layer of ours lies over.
                raise DamagedLayer(f"{folder}/{number} on {here} does not say any more what it lies over")
            found.insert(0, number)
            number = below if layout.is_number(below) else ""
            if number in found:
                raise DamagedLayer(
                    f"{folder}/{found[0]} on {here} says that it lies over {number}, which lies over it"
                )
    except FileNotFoundError:
        if _is_expected(record, found):
            return []
        named = f"layer {found[0]}" if found else "its record"
        raise DamagedLayer(f"{folder}/{number} on {here} is not there, though {named} names it") from None
    except OSError as e:
        raise DamagedLayer(f"{folder}/{number} on {here} cannot be read: {e.strerror}") from None
    finally:
        os.close(fd)
    return [f"{folder}/{number}" for number in found]


def _is_expected(record: Record, found: list[str]) -> bool:
    """Tell whether the active layer is missing since its disk is being removed, whose link goes first, or is
    a delta, which stayed.
    """
    plain = layout.plain(record.path)
    is_removed = not is_kept(os.path.dirname(plain)) and files.is_absent(plain)
    return not found and (
        is_removed or layout_delta.is_delta(record.path) or not layers.numbered(layout.layers(plain))
    )


def waiting(record: Record) -> list[str]:
    """Return the layers of a diff, the lowest first, that hold what its image has not been given yet."""
    return among(record, chain(record))


def among(record: Record, found: list[str]) -> list[str]:
    """Return the same of the layers that were `found` in its chain."""
    done = [number for number, path in enumerate(found) if layout.layer_of(path) == str(record.committed)]
    return [path for path in found[done[0] + 1 if done else 0 :] if not layers.is_empty(path)]


def is_kept(vm_dir: str) -> bool:
    """Tell whether a directory is of diffs that were kept."""
    own = layout.beside_named(os.path.basename(vm_dir))
    return own is not None and own.kind == "kept"


def may_wait(record: Record) -> bool:
    """Tell whether a diff holds what its image has not been given yet, or that cannot be told."""
    try:
        return bool(waiting(record))
    except DamagedLayer:
        return True


def size(record: Record) -> int:
    """Return the bytes of a diff that its image has not been given yet."""
    return sum(map(files.allocated, waiting(record)))
