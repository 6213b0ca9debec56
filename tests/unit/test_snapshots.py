# SPDX-License-Identifier: Apache-2.0
"""The algebra of layers on generated trees: plans are carried out on a model, and no remaining content
changes.
"""

from __future__ import annotations

from typing import Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semishared.errors import BadArguments, BadRecord, MissingImage, NotSupported
from semishared.model import steps as s
from semishared.model.disk.place import OVERLAY, PLACES
from semishared.opennebula import args
from semishared.plan.disk import freeze, snapshots
from semishared.plan.disk.snapshots import NO_LAYER, Facts, Tree

BASE = {0: "base", 1: "base"}


def request(number: int) -> args.SnapshotPlace:
    return args.SnapshotPlace.parse(["h1:/var/lib/one/datastores/101/5/disk.1", str(number), "5", "100"])


class Model:
    """Files as what they hold by block, and by whom they are backed; the base is nobody's to change."""

    def __init__(self, base: dict[int, str], format: str) -> None:
        self.base = base
        self.data: dict[int, dict[int, str]] = {0: {}}
        self.backing: dict[int, str] = {0: "base" if base else ""}
        self.format = {0: format}
        self.active = 0
        self.open: list[int] = []
        """What a running guest has open."""
        """Its QEMU has pulled data and not written all that it knows of it."""

    def facts(self, target: str = "") -> Facts:
        layers = {}
        for number, backing in self.backing.items():
            parent = int(backing) if backing.isdigit() else NO_LAYER
            below = self.format[parent] if parent != NO_LAYER else "raw" if backing else ""
            layers[number] = s.SeenLayer(parent, self.format[number], backing, below)
        return Facts(OVERLAY, Tree(layers, self.active), target=target)

    def content(self, number: int) -> dict[int, str]:
        backing = self.backing[number]
        below = self.content(int(backing)) if backing.isdigit() else dict(self.base) if backing else {}
        return {**below, **self.data[number]}

    def do(self, steps: list[s.Step]) -> None:
        for step in steps:
            getattr(self, type(step).__name__)(step)

    def NameLayer(self, step: s.NameLayer) -> None:  # noqa: N802
        for part in (self.data, self.backing, self.format):
            part[step.name] = part[step.layer]  # type: ignore[assignment]
        self._named = step.layer

    def AddLayer(self, step: s.AddLayer) -> None:  # noqa: N802
        assert step.over_format == self.format[step.over], "the header would lie about what is below"
        assert step.layer not in self.open
        self.data[step.layer], self.backing[step.layer], self.format[step.layer] = {}, str(step.over), "qcow2"

    def ActivateLayer(self, step: s.ActivateLayer) -> None:  # noqa: N802
        assert step.layer in self.data
        assert step.format == self.format[step.layer]
        self.active = step.layer

    def SwitchLayer(self, step: s.SwitchLayer) -> None:  # noqa: N802
        assert step.layer == self.active
        assert self.content(step.to) == self.content(step.layer)
        self.active = step.to
        self.open.append(step.to)
        # Two names of one file: the host counts the higher.
        if self.backing[step.to] != str(step.layer):
            for part in (self.data, self.backing, self.format):
                part.pop(step.layer)

    def _merge(self, layer: int, backing: str) -> None:
        held = self.content(layer)
        below = self.content(int(backing)) if backing.isdigit() else dict(self.base) if backing else {}
        self.data[layer] = {
            block: text
            for block, text in held.items()
            if block in self.data[layer] or below.get(block) != text
        }
        self.backing[layer] = backing

    def MergeLayer(self, step: s.MergeLayer) -> None:  # noqa: N802
        assert step.layer != self.active or not self.open, "the guest writes to it"
        assert step.copy or step.layer not in self.open, "the guest has it open"
        self._merge(step.layer, step.backing)

    def PullLayer(self, step: s.PullLayer) -> None:  # noqa: N802
        assert step.layer == self.active
        self._merge(step.layer, step.backing)

    def DropLayer(self, step: s.DropLayer) -> None:  # noqa: N802
        if step.layer in self.data and self.data[step.layer] is not self.data.get(step.layer + 1):
            assert str(step.layer) not in self.backing.values(), "somebody lies over it"
        for part in (self.data, self.backing, self.format):
            part.pop(step.layer)


actions = st.lists(
    st.tuples(
        st.sampled_from(["create", "create", "revert", "delete"]), st.integers(0, 7), st.integers(0, 5)
    ),
    max_size=25,
)


@settings(max_examples=300, deadline=None)
@given(actions=actions, raw=st.booleans(), skipped=st.booleans(), running=st.booleans())
def test_no_remaining_content_changes(
    actions: list[tuple[str, int, int]], raw: bool, skipped: bool, running: bool
) -> None:
    model = Model({} if raw else BASE, "raw" if raw else "qcow2")
    kept: dict[int, dict[int, str]] = {}
    now = model.content(0)
    following = 0
    for turn, (what, which, block) in enumerate(actions):
        text = f"{turn}"
        model.data[model.active][block] = text
        now[block] = text
        domain = "one-5" if running and what != "revert" else ""
        facts = model.facts("vda" if domain else "")
        model.open = list(facts.tree.chain()) if domain else []
        if what == "create":
            following += skipped and which == 0
            model.do(snapshots.create(request(following), facts, domain))
            kept[following] = dict(now)
            following += 1
        elif kept:
            number = sorted(kept)[which % len(kept)]
            if what == "revert":
                model.do(snapshots.revert(request(number), facts))
                now = dict(kept[number])
            else:
                model.do(snapshots.delete(request(number), facts, domain))
                del kept[number]
                assert snapshots.delete(request(number), model.facts(facts.target), domain) == []
        assert model.content(model.active) == now
        for number, content in kept.items():
            assert model.content(number) == content, f"snapshot {number} after {what}"
        assert set(model.data) == {*kept, model.active}
    model.open = []
    for number in list(kept):
        model.do(snapshots.delete(request(number), model.facts(), ""))
    assert set(model.data) == {model.active}
    assert model.content(model.active) == now


def test_second_run_of_a_snapshot_only_repairs_the_link() -> None:
    model = Model(BASE, "qcow2")
    model.do(snapshots.create(request(0), model.facts(), ""))
    disk = s.DiskRef(5, 1, "/var/lib/one/datastores/101/5")
    (step,) = snapshots.create(request(0), model.facts(), "")
    assert s.to_data(step) == s.to_data(s.ActivateLayer(disk, 1, "qcow2"))


def test_live_snapshot_records_before_it_switches() -> None:
    """SwitchLayer is the last step: nothing after it can fail and leave the guest on a layer that nobody
    knows.
    """
    steps = snapshots.create(request(3), Model(BASE, "qcow2").facts("vda"), "one-5")
    assert [type(step).__name__ for step in steps] == ["NameLayer", "AddLayer", "SwitchLayer"]


def test_delete_pulls_into_the_running_guests_layer_before_the_one_below_goes() -> None:
    model = Model(BASE, "qcow2")
    model.do(snapshots.create(request(0), model.facts("vda"), "one-5"))
    steps = snapshots.delete(request(0), model.facts("vda"), "one-5")
    assert [type(step).__name__ for step in steps] == ["PullLayer", "DropLayer"]
    model.do(steps[:1])
    steps = snapshots.delete(request(0), model.facts("vda"), "one-5")
    assert [type(step).__name__ for step in steps] == ["DropLayer"]
    model.do(steps)


def test_what_failed_snapshots_left_is_looked_for_only_where_opennebula_says_what_there_is() -> None:
    (step,) = snapshots.tidy(request(3), facts(), (0, 1), "one-5")
    assert s.to_data(step) == s.to_data(
        s.DropStrays(s.DiskRef(5, 1, "/var/lib/one/datastores/101/5"), (0, 1, 3), "one-5")
    )
    assert snapshots.tidy(request(3), facts(), (), "") == []
    assert snapshots.tidy(request(3), facts("in-place", image=IMAGE), (0,), "") == []


IMAGE = s.ImageRef(100, 7, "raw", "/var/lib/one/datastores/100/image")


def facts(how: str = "overlay", **changes: object) -> Facts:
    return Facts(
        PLACES[how],
        Tree({0: s.SeenLayer(NO_LAYER, "qcow2"), 1: s.SeenLayer(0, "qcow2", "0", "qcow2")}, 1),
        **changes,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "plan", [lambda f: snapshots.create(request(1), f, ""), lambda f: snapshots.delete(request(0), f, "")]
)
def test_refusals(plan: object) -> None:
    with pytest.raises(NotSupported, match="volatile"):
        plan(facts("volatile"))  # type: ignore[operator]
    with pytest.raises(NotSupported, match="2 system snapshots"):
        plan(facts(system_snapshots=2))  # type: ignore[operator]


def test_what_is_not_there_or_still_written() -> None:
    with pytest.raises(MissingImage, match="snapshot 7 of disk 1"):
        snapshots.revert(request(7), facts())
    with pytest.raises(MissingImage):
        snapshots.revert(request(1), facts())
    with pytest.raises(BadArguments, match="active"):
        snapshots.delete(request(1), facts(), "")
    with pytest.raises(MissingImage):
        snapshots.revert(request(0), facts("in-place", image=IMAGE))
    broken = Facts(OVERLAY, Tree({1: s.SeenLayer(0, "qcow2", "0", "qcow2")}, 1), target="vda")
    with pytest.raises(BadRecord, match="not there"):
        broken.tree.chain()


@pytest.mark.parametrize(
    "said",
    [s.OnStore({}, OVERLAY.name, False), s.DescribedDisk("?", "raw", None, {}, -1, (), (), "", 0)],
)
def test_what_is_no_description(said: Union[s.OnStore, s.DescribedDisk]) -> None:
    with pytest.raises(BadArguments):
        Facts.parse(said)


def test_the_log_says_how_the_guest_rested() -> None:
    assert list(freeze.lines(None, s.Rested(), s.StagedBase("x"), s.Rested("NONE"))) == []
    ((level, text),) = freeze.lines(s.Rested("AGENT", ""))
    assert (level, text[:24]) == ("info", "the guest's agent froze ")
    ((level, text),) = freeze.lines(s.Rested("SUSPEND", "no agent"))
    assert (level, text) == ("info", "the guest was suspended for the moment that was kept (no agent)")
    ((level, text),) = freeze.lines(s.Rested("NONE", "no agent; no power"))
    assert (level, text[:64]) == ("warn", "the guest could neither be frozen nor suspended (no agent; no po")
