# SPDX-License-Identifier: Apache-2.0
"""A session's way through images of which some cannot be had; what hosts answer is made up."""

from __future__ import annotations

from typing import Dict, List, Sequence

import pytest

from semishared.config import Config
from semishared.errors import HostUnreachable, ImageChanged
from semishared.front import base_tracker
from semishared.front.staging import Staging
from semishared.front.staging_hosts import Hosts, Wanted, Wish
from semishared.model.refs import ImageRef
from semishared.opennebula.xml import Host, parse

KNOWN = [Host(parse(f"<HOST><NAME>{name}</NAME><STATE>2</STATE></HOST>", "HOST")) for name in ("h1", "h2")]
HAS = {"has": True, "manifest": True, "current": "", "trouble": "", "lacks": [], "needed": 0, "tools": []}
A, B = (Wanted(ImageRef(100, number, "/x", "raw", f"{number}" * 64)) for number in (1, 2))


class Made(Staging):
    """A session of which images in `gone` cannot be had."""

    gone: Sequence[ImageRef] = ()
    down: Sequence[str] = ()

    def _settled(self, item: Wanted, answers: object) -> ImageRef:
        if item.image in self.gone:
            raise ImageChanged("gone")
        self._contents[item.image.base_name] = {}
        return item.image

    def _on_bridge(self, bridge: str, step: object) -> None:
        if bridge in self.down:
            raise HostUnreachable(f"{bridge} is down")


@pytest.fixture(autouse=True)
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every host say that it has all that it is asked for."""

    def describe(self: Hosts, root: str, wants: Dict[str, Sequence[ImageRef]]) -> Dict[str, List[Dict[str, object]]]:
        return {host: [dict(HAS) for _ in images] for host, images in wants.items()}

    monkeypatch.setattr(Hosts, "describe", describe)
    for name in ("begin", "leave"):
        monkeypatch.setattr(base_tracker, name, lambda *_: None)


def session(wants: Dict[str, List[Wanted]]) -> Made:
    return Made("/root", wants, KNOWN, Wish("auto", "auto", 0, True), Config(), lambda **_: None)


def test_host_that_wants_only_what_cannot_be_had_does_not_end_the_others_session() -> None:
    staging = session({"h1": [A], "h2": [B]})
    staging.gone = [A.image]
    found = staging.run()
    assert not found["h1"].ok and "gone" in found["h1"].why
    assert found["h2"].ok


def test_bridge_that_is_down_costs_only_the_hosts_of_its_images() -> None:
    staging = session({"h1": [A._replace(bridge="ceph")], "h2": [A._replace(bridge="ceph"), B]})
    staging.down = ["ceph"]
    found = staging.run()
    assert not found["h1"].ok and not found["h2"].ok and "ceph is down" in found["h1"].why
    assert found["h2"].lacks == {A.image.base_prefix}, "it has the other one"
    assert list(staging.generations) == [B.image]


def test_later_generation_that_cannot_be_had_leaves_what_came_of_the_one_before() -> None:
    later = Wanted(A.image._replace(generation="f" * 64))
    staging = session({"h1": [A, later], "h2": [A]})
    staging.gone = [later.image]
    found = staging.run()
    assert found["h2"].ok and not found["h1"].ok and "gone" in found["h1"].why


def test_only_image_that_cannot_be_had_is_what_is_wrong_with_the_session() -> None:
    staging = session({"h1": [A], "h2": [A]})
    staging.gone = [A.image]
    with pytest.raises(ImageChanged):
        staging.run()
