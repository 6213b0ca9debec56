# SPDX-License-Identifier: Apache-2.0
"""Sessions: who sends to whom, and who is left behind because the others would wait for him."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.errors import NotSupported
from semishared.plan import staging
from semishared.plan.staging import Described, Plan, Sample, leave_stream, plan, skips

HOSTS = st.lists(
    st.builds(Described, st.integers(1, 20).map(lambda n: f"h{n}"), st.booleans(), st.booleans()),
    max_size=8, unique_by=lambda item: item.host,
)  # fmt: skip


def described(have: str, lack: str, without: str = "") -> list[Described]:
    names = [*have.split(), *lack.split()]
    return [Described(name, name in have.split(), name not in without.split()) for name in names]


@given(HOSTS, st.sampled_from(("auto", "chain", "unicast")), st.booleans())
def test_every_host_that_lacks_the_base_gets_it_from_somebody_who_gets_it_otherwise(
    hosts: list[Described], transport: str, is_last: bool
) -> None:
    found = plan(hosts, ["far"], transport, is_last)
    lacking = {item.host for item in hosts if not item.has}
    assert {item.host for item in found.hosts} == lacking
    having = {item.host for item in hosts if item.has}
    reached = set(having)
    for item in found.hosts:
        assert item.host not in item.sources and len(item.sources) <= 4
        if item.host == found.sender:
            assert not having and item.from_store == "last" and not item.stream
        else:
            assert found.sender in item.sources
            assert item.from_store == ("last" if is_last else "no")
            assert any(source in reached for source in item.sources), "no circle"
        reached.add(item.host)
    if lacking:
        assert sum(item.host == found.sender for item in found.hosts) == (0 if having else 1), "one at most reads the store"


@pytest.mark.parametrize(
    ("hosts", "wish", "transport", "sender"),
    [
        (described("h1 h2", ""), "auto", "", ""),
        (described("", "h1"), "auto", "store", "h1"),
        (described("h1", "h2"), "auto", "unicast", "h1"),
        (described("", "h1 h2"), "auto", "unicast", "h1"),
        (described("h1", "h2 h3"), "auto", "multicast", "h1"),
        (described("h1 h4", "h2 h3", "h1"), "auto", "multicast", "h4"),
        (described("h1", "h2 h3", "h1"), "auto", "chain", "h1"),
        (described("", "h1 h2 h3 h4", "h1"), "auto", "multicast", "h2"),
        (described("", "h1 h2 h3", "h1"), "auto", "chain", "h2"),
        (described("h1", "h2 h3", "h2"), "auto", "chain", "h1"),
        (described("h1", "h2"), "multicast", "multicast", "h1"),
        (described("h1", "h2 h3"), "chain", "chain", "h1"),
    ],
)
def test_transport_and_sender(hosts: list[Described], wish: str, transport: str, sender: str) -> None:
    found = plan(hosts, [], wish)
    assert (found.transport, found.sender) == (transport, sender)
    assert any(item.stream for item in found.hosts) == (transport == "multicast")


def test_chain_has_a_way_round_each_link() -> None:
    found = plan(described("h0", "h1 h2 h3 h4 h5"), [], "chain")
    assert [item.sources for item in found.hosts] == [
        ("h0",), ("h1", "h0"), ("h2", "h1", "h0"), ("h3", "h2", "h1", "h0"), ("h4", "h3", "h2", "h0")
    ]  # fmt: skip


def test_rate_limit_is_the_senders_whatever_the_number_of_hosts_it_serves() -> None:
    found = plan(described("h0", "h1 h2 h3 h4"), [], "unicast")
    assert staging.rate(8_000_000, found) == 2_000_000
    assert staging.rate(0, found) == 0 and staging.rate(3, found) == 1
    assert staging.rate(8_000_000, plan(described("h0", "h1 h2 h3 h4"), [], "chain")) == 8_000_000, "each link is another host's"


def test_wish_for_multicast_that_cannot_be_is_refused_with_who_lacks_it() -> None:
    with pytest.raises(NotSupported, match="udpcast on h2"):
        plan(described("h1", "h2", "h2"), [], "multicast")
    assert plan(described("h1", ""), [], "multicast") == Plan("", "", ())


def history(**speeds: tuple[str, float, float]) -> staging.History:
    """Return 6 s of hosts with (source, extents per second, speed of the stream in bursts)."""
    return {
        host: [Sample(t / 2, int(100 + have * t / 2), source, int(speed), int(have * t) << 22) for t in range(13)]
        for host, (source, have, speed) in speeds.items()
    }  # fmt: skip


def test_receiver_to_which_the_stream_comes_slowly_leaves_it() -> None:
    fast = ("stream", 0.3, 12e6)
    assert leave_stream(history(h1=fast, h2=fast, h3=fast, h4=("stream", 0.3, 1.2e6)), 6, 0) == ["h4"]
    assert leave_stream(history(h1=fast, h2=("stream", 0.3, 1.2e6)), 6, 0) == ["h2"]
    assert leave_stream(history(h1=fast, h2=fast, h3=("stream", 0.3, 9e6)), 6, 0) == []
    assert leave_stream(history(h1=fast, h2=fast, h3=("stream", 0.3, 0)), 6, 0) == [], "nothing is known of it"
    assert leave_stream(history(h1=("stream", 0.3, 1e6)), 6, 0) == [], "alone nobody is slow"
    assert leave_stream(history(h1=fast, h2=fast, h3=("h1", 0.3, 0)), 6, 0) == [], "not in the stream any more"


def test_receivers_that_the_stream_does_not_reach_leave_it_after_some_seconds() -> None:
    nothing, fast = ("stream", 0.0, 0), ("stream", 3.0, 12e6)
    assert leave_stream(history(h1=nothing, h2=nothing), 6, 0) == []
    late = {host: [*samples, Sample(9.0, 0, "stream", 0)] for host, samples in history(h1=nothing, h2=nothing).items()}
    assert leave_stream(late, 9, 0) == ["h1", "h2"]
    some = {**late, "h3": [*history(h3=fast)["h3"], Sample(9.0, 127, "stream", 12 * 10**6, 27 << 22)]}
    assert leave_stream(some, 9, 0) == ["h1", "h2"]


def test_host_that_has_caught_up_with_a_slow_source_leaves_it() -> None:
    found = history(h1=("h0", 3, 0), h2=("h1", 0.3, 0), h3=("h2", 0.3, 0))
    assert skips(found, 6) == [("h3", "h2")]
    assert skips(history(h1=("h0", 3, 0), h2=("h1", 3, 0), h3=("h2", 2.5, 0)), 6) == []
    behind = history(h1=("h0", 3, 0), h2=("h1", 0.3, 0), h3=("h2", 0.3, 0))
    behind["h2"] = [sample._replace(have=sample.have + 50) for sample in behind["h2"]]
    assert skips(behind, 6) == [], "there is still much to be had from it"
    assert skips({}, 6) == []
