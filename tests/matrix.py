# SPDX-License-Identifier: Apache-2.0
"""The matrix of what drivers do: action x place x format x (off/live) x (plain/pool), each cell proved on
real components.

How a test reports what it has proved (the fixture is in tests/conftest.py, for every suite). One line at its
end; it counts only if the test passes:

    def test_...(cloud, cell): ...; cell("snap_create", "overlay", "raw", "live")

Several formats or modes at once: cell("clone", "copy", ("raw", "qcow2"), ("off", "live")). On hosts with a
pool of devices, one word more: cell("clone", "copy", "raw", "off", "pool"). A cell that nothing has to report
needs its reason in `reason` below; a cell without one that no test of `make test` reported fails the run
(tests/suites.py prints the table). A refused cell is proved too: its refusal is tested.

place    in-place | overlay | diff | copy | remote-first | store-clone | volatile
format   of the image (of the disk, if volatile) in a mounted store: raw | qcow2; rbd: raw, in a store on Ceph
mode     off: no domain runs (deploy, terminate, POWEROFF, UNDEPLOYED ...); live: the guest runs (attach,
detach ...)
devices  plain: what is local lies below DATASTORE_LOCATION; pool: on the devices of the host's pool
"""

from __future__ import annotations

from itertools import product
from typing import Dict, Iterable, List, Tuple

Cell = Tuple[str, str, str, str, str]

ACTIONS: Dict[str, str] = {
    "clone": "clone, ln, mkimage: the disk appears (off: deploy; live: attach)",
    "delete": "mvds, delete: the disk goes (off: terminate; live: detach)",
    "cpds": "save-as",
    "cpds-snapshot": "save-as of a snapshot",
    "snap_create": "snapshot (live: snap_create_live)",
    "snap_delete": "delete a snapshot",
    "snap_revert": "back to a snapshot",
    "resize": "grow",
    "mv": "undeploy, stop, resume, cold migration",
    "migrate": "live migration",
    "backup": "prebackup, postbackup",
    "restore": "restore from a backup",
    "detach": "letting go of the store (`semishared detach`)",
    "limit": "its I/O class limits it (off: deploy; live: attach)",
    "allocate": "SPARSE = no: all of its blocks are there when it is made",
}
PLACES = ("in-place", "overlay", "diff", "copy", "remote-first", "store-clone", "volatile")
FORMATS = ("raw", "qcow2", "rbd")
MODES = ("off", "live")
DEVICES = ("plain", "pool")
CELLS: List[Cell] = list(product(ACTIONS, PLACES, FORMATS, MODES, DEVICES))

REFUSED = "refused: "
"""A reason that begins so is a refusal of ours, which a test must report as proved; any other says why no
such call exists.
"""


def reason(cell: Cell) -> str:
    """Return why a cell is no success: 'refused: ...' (the refusal is tested), or why oned never asks; '' if
    it works.
    """
    action, place, format, mode, devices = cell
    if devices == "pool" and place in ("in-place", "store-clone"):
        return "it lies on the store, whatever devices the host has"
    if (place, format) == ("volatile", "rbd"):
        return "volatile disks are files on the host, whatever the images' store"
    if (
        place == "diff"
        and action in ("snap_create", "snap_delete", "snap_revert")
        and (action, mode) != ("snap_revert", "live")
    ):
        return REFUSED + (
            "OpenNebula keeps snapshots of a persistent image with the image, whatever VM has it; "
            "these would be on a host"
        )
    if (action, place) == ("cpds-snapshot", "diff"):
        return "such disks have no snapshots"
    if cell[:4] == ("clone", "remote-first", "rbd", "live"):
        return REFUSED + "OpenNebula's attach script has no words for the user of what a disk lies over"
    if cell[:4] == ("limit", "remote-first", "rbd", "live"):
        return "such a disk is not attached to a running VM"
    if action == "migrate" and mode == "off":
        return "a VM that is off is migrated cold: mv"
    if action == "mv" and mode == "live":
        return "the VM is saved or shut down first; what runs is moved by migrate"
    if action in ("snap_revert", "restore") and mode == "live":
        return "oned allows it in POWEROFF only"
    if action == "allocate" and mode == "live":
        return "an attached disk is made by the same steps, before its guest has it"
    if action == "allocate" and place == "in-place":
        return "its guest has the image itself: SPARSE is of its upload then"
    if action == "allocate" and format == "rbd":
        return "a disk on the host is a file, whatever its image's store; images on Ceph have no such blocks"
    if action == "detach" and place != "remote-first":
        return "it lies over no image of a store that its guest could let go of"
    if place == "volatile" and action in (
        "cpds",
        "cpds-snapshot",
        "snap_create",
        "snap_delete",
        "snap_revert",
    ):
        return "oned refuses snapshots and save-as of volatile disks"
    return ""


def must_report(cell: Cell) -> bool:
    """Tell whether a test has to report the cell: it works, or its refusal is ours."""
    why = reason(cell)
    return not why or why.startswith(REFUSED)


def expand(
    action: object, place: object, format: object, mode: object, devices: object = "plain"
) -> Iterable[Cell]:
    """Yield the cells of a report, each argument one value or several; raise ValueError for one that does not
    exist.
    """
    given = (action, place, format, mode, devices)
    parts = [(item,) if isinstance(item, str) else tuple(item) for item in given]  # type: ignore[arg-type]
    for one, two, three, four, five in product(*parts):
        cell: Cell = (one, two, three, four, five)
        if cell not in CELLS:
            raise ValueError(f"no cell of the matrix: {cell}")
        if not must_report(cell):
            raise ValueError(f"{cell} cannot be proved: {reason(cell)}")
        yield cell


def missing(reported: Iterable[Cell]) -> List[Cell]:
    """Return the cells that had to be reported and were not."""
    known = set(reported)
    return [cell for cell in CELLS if must_report(cell) and cell not in known]


def table(reported: Iterable[Cell]) -> str:
    """Return the matrix for people: a line per action and place; o passed, r refused as it must be, . not
    asked, X missing.
    """
    known = set(reported)

    def mark(cell: Cell) -> str:
        if not must_report(cell):
            return "."
        if cell not in known:
            return "X"
        return "r" if reason(cell) else "o"

    every = [(format, mode, devices) for devices, mode, format in product(DEVICES, MODES, FORMATS)]
    columns = [column for column in every if any(must_report(cell) for cell in CELLS if cell[2:] == column)]
    words = [
        f"{devices.replace(DEVICES[0], '')} {format} {mode}".strip() for format, mode, devices in columns
    ]
    lines = [f"{'action':14} {'place':12} " + " ".join(f"{word:>10}" for word in words)]
    for action, place in product(ACTIONS, PLACES):
        marks = [mark((action, place, *column)) for column in columns]
        lines.append(
            f"{action:14} {place:12} "
            + " ".join(f"{m:>{max(len(word), 10)}}" for m, word in zip(marks, words))
        )
    lines.append(
        "o passed on real components   r refused, as it must be   . never asked (reasons below)   "
        "X NOT REPORTED"
    )
    reasons: Dict[str, List[str]] = {}
    for cell in CELLS:
        if reason(cell):
            word = f"{cell[0]} {cell[3]}" + (
                f" {cell[1]}" if cell[0] == "migrate" or cell[1] == "volatile" else ""
            )
            word = "rbd" if cell[1:3] == ("volatile", "rbd") else word
            word = "pool" if cell[4] == "pool" and reason((*cell[:4], "plain")) != reason(cell) else word
            rows = reasons.setdefault(reason(cell), [])
            if word not in rows:
                rows.append(word)
    lines += [f"  {why}: {', '.join(words)}" for why, words in reasons.items()]
    return "\n".join(lines)
