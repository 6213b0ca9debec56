# SPDX-License-Identifier: Apache-2.0
"""A session's way through images of which some cannot be had; what hosts answer is made up."""

from __future__ import annotations

from typing import Dict, List, Sequence

import pytest

from semishared.config import Config
from semishared.errors import HostUnreachable, ImageChanged, NoSpace, TransferCorrupt
from semishared.front import questions
from semishared.front.staging import Staging
from semishared.front.staging_round import Hosts, Round, Wanted, Wish
from semishared.model.base.steps import DescribedBase, HeldBase, Listed, StreamBases
from semishared.model.refs import ImageRef
from semishared.named import to_data
from semishared.opennebula.xml import Host, parse
from semishared.plan.base.sharing import Plan
from semishared.tools import extents

KNOWN = [Host(parse(f"<HOST><NAME>{name}</NAME><STATE>2</STATE></HOST>", "HOST")) for name in ("h1", "h2")]
HAS = DescribedBase([], 0, 0, 0, "", "", True, True, 0, "", [], [], "")
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

    def _on_bridge(self, item: Wanted, step: object) -> None:
        if item.changers and set(item.changers) <= set(self.down):
            raise HostUnreachable(f"{item.changers[0]} is down")


@pytest.fixture(autouse=True)
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every host say that it has all that it is asked for."""

    def describe(
        self: Hosts, root: str, wants: Dict[str, Sequence[ImageRef]]
    ) -> Dict[str, List[DescribedBase]]:
        return {host: [HAS for _ in images] for host, images in wants.items()}

    monkeypatch.setattr(Hosts, "describe", describe)
    for name in ("begin", "leave"):
        monkeypatch.setattr(questions, name, lambda *_: None)


def session(wants: Dict[str, List[Wanted]]) -> Made:
    return Made("/root", wants, KNOWN, Wish("auto", "auto", 0, True), Config(), lambda **_: None)


def test_host_that_wants_only_what_cannot_be_had_does_not_end_the_others_session() -> None:
    staging = session({"h1": [A], "h2": [B]})
    staging.gone = [A.image]
    found = staging.run()
    assert not found["h1"].ok and "gone" in found["h1"].why
    assert found["h2"].ok


def test_bridge_that_is_down_costs_only_the_hosts_of_its_images() -> None:
    staging = session({"h1": [A._replace(changers=("ceph",))], "h2": [A._replace(changers=("ceph",)), B]})
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


def test_hashes_are_of_a_host_that_tells_them_and_of_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    text = extents.Manifest("raw", 1, {0: "ab" * 32}).text()
    said = {"gone": HostUnreachable("gone"), "wrong": text + b"1 " + b"cd" * 32, "right": text}
    image = A.image._replace(generation=extents.generation_of(text))
    noted: List[Dict[str, object]] = []

    def manifest(self: Hosts, host: str, root: str, image: ImageRef) -> bytes:
        found = said[host]
        if isinstance(found, bytes):
            return found
        assert isinstance(found, HostUnreachable)
        raise found

    monkeypatch.setattr(Hosts, "manifest", manifest)
    staging = Staging(
        "/root",
        {"h1": [A]},
        KNOWN,
        Wish("auto", "auto", 0, True),
        Config(),
        lambda **event: noted.append(event),
    )
    assert staging._extents(["gone", "wrong", "right"], image) == {0: "ab" * 32}
    assert [event["host"] for event in noted] == ["gone", "wrong"]
    with pytest.raises(TransferCorrupt, match="wrong has sent"):
        staging._extents(["gone", "wrong"], image)


def test_host_that_leaves_while_it_reads_an_image_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: List[str] = []

    def read(self: Staging, host: str, item: Wanted) -> tuple[str, str]:
        asked.append(host)
        if host != "h3":
            raise HostUnreachable(f"{host} is gone")
        return host, "f" * 32

    monkeypatch.setattr(Staging, "_read_by", read)
    answers = {host: HAS for host in ("h1", "h2", "h3", "h4")}
    answers = {"h0": HAS._replace(trouble="not mounted"), **answers}
    noted: List[object] = []
    staging = session({"h1": [A]})
    staging.hosts.tell = lambda **event: noted.append((event["host"], str(event["text"])[:16]))
    assert staging._read_whole(A, answers) == ("h3", "f" * 32)
    assert asked == ["h1", "h2", "h3"]
    assert noted == [("h1", "SS010 h1 is gone"), ("h2", "SS010 h2 is gone")]
    with pytest.raises(HostUnreachable, match="h2"):
        session({"h1": [A]})._read_whole(A, {host: answers[host] for host in ("h1", "h2")})


def test_stream_is_not_held_up_for_who_waits_for_another_session() -> None:
    hosts = Hosts(KNOWN, Wish("auto", "auto", 0, True), Config(), lambda **_: None)
    begun = Round(hosts, "/root", {}, Plan("multicast", "h1", (), ()), {}, {}, "rest")
    begun._progress("h2", {"source": "here", "have": 1})
    assert not begun._ready | begun._without, "its receiver is not there yet"
    begun._progress("h2", {"source": "stream", "ready": True})
    begun._progress("h1", {"source": "another session"})
    assert (begun._ready, begun._without) == ({"h2"}, {"h1"})


def test_stream_is_packed_with_what_all_its_receivers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, sent = Hosts(KNOWN, Wish("auto", "auto", 0, True), Config(), lambda **_: None), list[object]()
    hosts.tools = {
        "h1": frozenset({"none", "zstd", "lzop", "udp-sender"}),
        "h2": frozenset({"none", "lzop", "udp-receiver"}),
    }

    class Conversation:
        def __enter__(self) -> Conversation:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def begin(self, steps: List[object], last: bool) -> None:
            sent.extend(steps)

        def finish(self) -> List[object]:
            return [{}]

    monkeypatch.setattr(hosts, "session", lambda host: Conversation())
    for ready, unpacks in ((["h1", "h2"], ("lzop", "none")), (["h1"], ("lzop", "none", "zstd"))):
        begun = Round(hosts, "/root", {}, Plan("multicast", "h1", (), ()), {}, {}, "rest")
        begun._ready = set(ready)
        begun._send(ready, 9000)
        step = sent.pop()
        assert isinstance(step, StreamBases) and (step.receivers, step.unpacks) == (len(ready), unpacks)


def test_host_that_has_left_sends_to_nobody_in_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = HAS._replace(has=False, lacks=[[0, 1]])
    senders: List[str] = []
    whom: List[object] = []
    asked: List[List[str]] = []

    def describe(
        self: Hosts, root: str, wants: Dict[str, Sequence[ImageRef]]
    ) -> Dict[str, List[DescribedBase]]:
        asked.append(list(wants))
        return {host: [HAS if host == "h1" else lacks] for host in wants if host != "h1" or len(asked) < 3}

    class Failing:
        """A round in which nothing comes."""

        def __init__(self, hosts: Hosts, root: str, images: object, chosen: Plan, *more: object) -> None:
            senders.append(chosen.sender)
            whom.append(more[-1])

        def run(self) -> Dict[str, object]:
            return {}

    monkeypatch.setattr(Hosts, "describe", describe)
    monkeypatch.setattr("semishared.front.staging.Round", Failing)
    monkeypatch.setattr(Staging, "_extents", lambda *_: {0: "ab" * 32})
    monkeypatch.setattr(questions, "holders_of", lambda *_: [])
    staging = Staging(
        "/root", {"h1": [A], "h2": [A]}, KNOWN, Wish("auto", "auto", 0, True), Config(), lambda **_: None
    )
    found = staging.run()
    assert asked[1:] == [["h1", "h2"]] * 3
    assert senders == ["h1", "h2", "h2"]
    assert whom == ["rest", "rest", "all"], "the store serves each host only in the last round"
    assert found["h1"].ok and not found["h2"].ok


def test_host_that_asks_for_room_is_told_what_goes_for_as_much_as_it_needs() -> None:
    bases = [HeldBase(f"100-{number}-{'a' * 32}", 50, number, number, (), 50, False, "") for number in (3, 4)]
    listed = {"question": "base", **to_data(Listed(bases, free=30, total=1000, whole=1000))}
    staging = Staging(
        "/root",
        {"h1": [A]},
        KNOWN,
        Wish("auto", "auto", 0, True),
        Config(bases_free_floor="0"),
        lambda **_: None,
    )
    for needed, gone in ((30, []), (31, bases[:1]), (131, None), ("all", [])):
        if gone is None:
            with pytest.raises(NoSpace):
                staging._answer("h1", {**listed, "needed": needed})
        else:
            assert staging._answer("h1", {**listed, "needed": needed}) == {
                "evict": tuple(base.name for base in gone)
            }, needed
    assert staging._answer("h1", {"question": "other"}) == {}
