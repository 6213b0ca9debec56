# SPDX-License-Identifier: Apache-2.0
"""What gc takes for left over in a pool on Ceph, and what it leaves alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from semishared.model import steps as s
from semishared.model.store import image_steps
from semishared.plan.care import gc, gc_stores
from semishared.plan.care.gc import Known

ACCESS = s.Access("rbd", "libvirt", "bases", "bridge")
KNOWN = Known(
    {5: "h1"},
    frozenset(),
    frozenset(),
    frozenset({"one/one-7", "one/one-8"}),
    newest_vm=8,
    past=frozenset({(6, 0, "one/one-7")}),
)


def pool(*names: str) -> gc_stores.Pool:
    return gc_stores.Pool("fe", 110, "one", ACCESS, names)


def look(name: str, **more: Any) -> image_steps.StoredImage:
    usual = image_steps.StoredImage(7200, 1 << 20, f"datastore 110 one/{name}", [], [])
    return usual._replace(**more)


def test_only_ours_that_oned_does_not_know_are_looked_at() -> None:
    names = (
        "one-7",
        "one-9",
        "one-7-5-0",
        "one-7-6-0",
        "one-7.semishared-0123456789ab",
        "one-7.semishared-changing",
        "one-7-6-0.semishared-0123456789ab",
        "one-sys-5-1",
        "somebody",
        "one-7-1:2",
        "one-7.semishared-x",
        "one-x",
    )
    assert gc_stores.suspicious(pool(*names), KNOWN) == [
        "one-9",
        "one-7-6-0",
        "one-7.semishared-0123456789ab",
        "one-7.semishared-changing",
        "one-7-6-0.semishared-0123456789ab",
    ]


@pytest.mark.parametrize(
    ("name", "more", "kind", "keep"),
    [
        ("one-7-6-0", {}, "clone", ""),
        ("one-7-9-0", {}, "clone", "newer"),
        ("one-7-8-0", {}, "clone", "another cloud's"),
        ("one-7-6-1", {}, "clone", "another cloud's"),
        ("one-7-6-0", {"watchers": ["10.0.0.1:0/7"]}, "clone", "10.0.0.1"),
        ("one-7-6-0", {"clones": ["one/x"]}, "clone", "one/x"),
        ("one-7-6-0", {"made": ""}, "", ""),
        ("one-7-6-0", {"made": "datastore 110 two/one-7-6-0"}, "", ""),
        ("one-7.semishared-0123456789ab", {"made": ""}, "staged", ""),
        ("one-7.semishared-0123456789ab", {"watchers": ["10.0.0.1:0/7"]}, "staged", "10.0.0.1"),
        ("one-7.semishared-changing", {}, "changing", "undoes"),
        ("one-9", {}, "image", "somebody's data"),
        ("one-9", {"made": ""}, "", ""),
    ],
)
def test_what_goes_and_what_stays(name: str, more: dict[str, Any], kind: str, keep: str) -> None:
    found = list(gc_stores.find_in_pool(pool(name), {name: look(name, **more)}, KNOWN))
    assert [item.kind for item in found] == ([kind] if kind else [])
    for item in found:
        assert (keep in item.keep) if keep else not item.keep
        (step,) = item.steps()
        assert step == image_steps.RemoveImage(step.image)  # type: ignore[attr-defined]
        assert step.image.source == f"one/{name}"  # type: ignore[attr-defined]


def test_young_ones_are_left_alone() -> None:
    name = "one-7-6-0"
    found = gc_stores.find_in_pool(pool(name), {name: look(name, age=60)}, KNOWN)
    old, young = gc.aged(found, 3600)
    assert old == [] and [left.path for left in young] == [f"one/{name}"]


def test_images_with_snapshots_are_looked_at_but_for_what_an_action_is_at() -> None:
    names = (
        "one-7",
        "one-7-5-0",
        "one-7.semishared-0123456789ab",
        "one-7.semishared-changing",
        "somebody",
        "one-7-1:2",
    )
    assert gc_stores.with_snapshots(pool(*names)) == ["one-7", "one-7-5-0"]


@pytest.mark.parametrize(
    ("snapshot", "more", "kind", "keep"),
    [
        ("semishared-undo", {}, "snapshot", ""),
        ("semishared-saved", {}, "snapshot", ""),
        ("semishared-saved", {"making": "10.0.0.2:0/7"}, "snapshot", "10.0.0.2"),
        ("semishared-old-0a1b2c3d", {}, "snapshot", ""),
        ("semishared-old-0a1b2c3d", {"clones": ["one/x"]}, "snapshot", "one/x"),
        ("semishared-lent-17", {}, "lent", ""),
        ("semishared-lent-17", {"watchers": ["10.0.0.1:0/7"]}, "lent", "10.0.0.1"),
        ("semishared-lent-17", {"image": "one-8"}, "", ""),
        ("semishared-undo", {"age": 60}, "snapshot", ""),
        ("semishared-backup-6-0123456789abcdef-3", {}, "mark", ""),
        ("semishared-backup-6-0123456789abcdef-3", {"clones": ["one/x"]}, "mark", "one/x"),
        ("semishared-backup-9-0123456789abcdef-3", {}, "mark", "newer"),
        ("semishared-backup-5-0123456789abcdef-3", {}, "", ""),
        ("semishared-backup-6-0123456789abcdef-3", {"image": "one-7-6-0"}, "", ""),
        ("semishared-backup-6-of-a-later-version", {}, "", ""),
        ("semishared-of-a-later-version", {}, "", ""),
    ],
)
def test_which_snapshots_go_and_which_stay(snapshot: str, more: dict[str, Any], kind: str, keep: str) -> None:
    known, name = dataclasses.replace(KNOWN, idle=frozenset({"one/one-7"})), more.get("image", "one-7")
    there = image_steps.PassingSnapshot(snapshot, more.get("age", 7200), more.get("clones", []))
    found = {name: image_steps.PassingSnapshots(more.get("watchers", []), {"17": there})}
    looks = (
        {"one-7.semishared-0123456789ab": look("x", watchers=[more["making"]])} if "making" in more else {}
    )
    items = list(gc_stores.snapshots(pool(name), found, looks, known))
    assert [item.age for item in items] == [more.get("age", 7200)] * len(items)
    assert [item.kind for item in items] == ([kind] if kind else [])
    for item in items:
        assert (keep in item.keep) if keep else not item.keep
        assert item.path == f"one/{name}@{snapshot}"
        (step,) = item.steps()
        assert step == image_steps.DropSnapshot(step.image, 17)  # type: ignore[attr-defined]
