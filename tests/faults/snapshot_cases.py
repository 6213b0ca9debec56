# SPDX-License-Identifier: Apache-2.0
"""Snapshots and resize in the kill suite: each place, with a tree of layers; what a kill may not change is
every content.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

from semishared.config import Config
from semishared.model import steps as s
from semishared.opennebula import args
from semishared.plan.disk import snapshots
from semishared.wire import session as ssh

from .cases import (
    PERSISTENT,
    RAW,
    VM,
    Case,
    Environment,
    MiB,
    Stored,
    clone_steps,
    datastore,
    ln_steps,
    plan,
    source,
)
from .rig import Rig

Plan = Callable[[args.SnapshotPlace, snapshots.Facts], List[s.Step]]
PLACES: Dict[str, Tuple[Stored, Dict[str, Any]]] = {
    "overlay": (RAW, {}),
    "copy": (RAW, {"SEMISHARED_LOCAL": "copy"}),
    "remote-first": (RAW, {"SEMISHARED_LOCAL": "remote-first"}),
    "on store": (RAW, {"SEMISHARED_PLACE": "shared"}),
    "in place": (PERSISTENT, {}),
}
WHERE = f"a/101/{VM}/disk.0"


def _written(content: bytes, *marks: int) -> bytes:
    """Return the content after writes: mark N is 64 KiB of byte N at N MiB."""
    changed = bytearray(content)
    for mark in marks:
        changed[mark * MiB : mark * MiB + 65536] = bytes([mark]) * 65536
    return bytes(changed)


def change(rig: Rig, env: Environment, what: str, number: int) -> None:
    """Do what tm/snap_* does: ask, plan, do, in one session."""
    request = args.SnapshotPlace.parse([f"a:{rig.inside(f'101/{VM}/disk.0')}", str(number), str(VM), "100"])
    planners: Dict[str, Plan] = {
        "create": lambda request, facts: snapshots.create(request, facts, ""),
        "delete": lambda request, facts: snapshots.delete(request, facts, ""),
        "revert": snapshots.revert,
    }
    with rig.sessions(env), ssh.Session("a", "test", Config()) as session:
        (found,) = session.run([s.DescribeDisk(s.DiskRef(VM, 0, rig.inside(f"101/{VM}")), "")])
        session.run(planners[what](request, snapshots.Facts.parse(found)))


def _write(rig: Rig, mark: int) -> None:
    """Write as the guest would."""
    (found,) = plan(rig, "a", [s.DescribeVm(VM, rig.inside(f"101/{VM}"))], {})
    (record,) = found["records"]  # type: ignore[index]
    rig.run("a", ["qemu-io", "-f", record["format"], "-c", f"write -q -P {mark} {mark}M 64k", record["path"]])


def _disk(rig: Rig, place: str) -> None:
    image, attributes = PLACES[place]
    plan(rig, "a", ln_steps(rig, image) if place == "in place" else clone_steps(rig, image, **attributes), {})
    _write(rig, 2)


def _tree(rig: Rig, place: str) -> None:
    """Snapshots 0, 1 and 2, of which 2 hangs on 0 and not on 1."""
    _disk(rig, place)
    change(rig, {}, "create", 0)
    _write(rig, 3)
    change(rig, {}, "create", 1)
    _write(rig, 4)
    change(rig, {}, "revert", 0)
    _write(rig, 6)
    change(rig, {}, "create", 2)
    _write(rig, 7)


TREE = {0: (2,), 1: (2, 3), 2: (2, 6), -1: (2, 6, 7)}


def _case(what: str, number: int, place: str) -> Case:
    image = PLACES[place][0]
    contents = {key: _written(image.content, *marks) for key, marks in TREE.items()}
    if what == "create" and number == 0:
        contents = {-1: _written(image.content, 2), 0: _written(image.content, 2)}
    skipped = " after a number that was skipped" if number == 5 else ""
    return Case(
        f"snap_{what} {place}{skipped}" + (f", snapshot {number}" if what == "delete" else ""),
        lambda rig, env: change(rig, env, what, number),
        (lambda rig: _disk(rig, place))
        if what == "create" and number == 0
        else (lambda rig: _tree(rig, place)),
        guest={WHERE: contents.pop(-1)},
        restored=contents[number] if what == "revert" else b"",
        snapshots={WHERE: contents},
    )


def _grow(place: str) -> Case:
    image = PLACES[place][0]
    content = _written(image.content, 2)
    grown = content + bytes(8 * MiB)
    return Case(
        f"resize {place}",
        lambda rig, env: plan(
            rig, "a", [s.GrowDisk(s.DiskRef(VM, 0, rig.inside(f"101/{VM}")), 16 * MiB)], env
        ),
        lambda rig: _disk(rig, place),
        guest={WHERE: content},
        restored=grown,
    )


def _image(action: str) -> Case:
    """The datastore's own actions, on an image that a VM has left with snapshots."""
    number = 1
    xml = "<ID>5</ID><SOURCE>{}</SOURCE><TARGET_SNAPSHOT>1</TARGET_SNAPSHOT>"

    def setup(rig: Rig) -> None:
        _tree(rig, "in place")
        plan(rig, "a", [s.RemoveVm(VM, rig.inside(f"101/{VM}"))], {})

    return Case(
        f"datastore {action}",
        lambda rig, env: datastore(rig, env, action, xml.format(source(rig, PERSISTENT))),
        setup,
        killed=("fe",),
        restored=_written(PERSISTENT.content, *TREE[number]) if action != "snap_delete" else b"",
    )


SNAPSHOT_CASES = [
    *(_case("create", 0, place) for place in PLACES),
    *(_case("create", 5, place) for place in PLACES if place != "in place"),
    *(_case("revert", 1, place) for place in PLACES),
    *(_case("delete", number, place) for place in PLACES for number in (0, 2)),
    *(_grow(place) for place in PLACES),
    *(_image(action) for action in ("snap_delete", "snap_revert", "snap_flatten")),
]
