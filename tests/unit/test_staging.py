# SPDX-License-Identifier: Apache-2.0
"""Sessions: who is left behind because the others would wait for him."""

from __future__ import annotations

from semishared.plan.base import sharing
from semishared.plan.base.sharing import Sample, leave_stream, skips


def history(**speeds: tuple[str, float, float]) -> sharing.History:
    """Return 6 s of hosts with (source, extents per second, speed of the stream in bursts)."""
    return {
        host: [
            Sample(t / 2, int(100 + have * t / 2), source, int(speed), int(have * t) << 22) for t in range(13)
        ]
        for host, (source, have, speed) in speeds.items()
    }


def test_receiver_to_which_the_stream_comes_slowly_leaves_it() -> None:
    fast = ("stream", 0.3, 12e6)
    assert leave_stream(history(h1=fast, h2=fast, h3=fast, h4=("stream", 0.3, 1.2e6)), 6, 0) == ["h4"]
    assert leave_stream(history(h1=fast, h2=("stream", 0.3, 1.2e6)), 6, 0) == ["h2"]
    assert leave_stream(history(h1=fast, h2=fast, h3=("stream", 0.3, 9e6)), 6, 0) == []
    assert leave_stream(history(h1=fast, h2=fast, h3=("stream", 0.3, 0)), 6, 0) == [], (
        "nothing is known of it"
    )
    assert leave_stream(history(h1=("stream", 0.3, 1e6)), 6, 0) == [], "alone nobody is slow"
    assert leave_stream(history(h1=fast, h2=fast, h3=("h1", 0.3, 0)), 6, 0) == [], (
        "not in the stream any more"
    )


def test_receivers_that_the_stream_does_not_reach_leave_it_after_some_seconds() -> None:
    nothing, fast = ("stream", 0.0, 0), ("stream", 3.0, 12e6)
    assert leave_stream(history(h1=nothing, h2=nothing), 6, 0) == []
    late = {
        host: [*samples, Sample(9.0, 0, "stream", 0)]
        for host, samples in history(h1=nothing, h2=nothing).items()
    }
    assert leave_stream(late, 9, 0) == ["h1", "h2"]
    some = {**late, "h3": [*history(h3=fast)["h3"], Sample(9.0, 127, "stream", 12 * 10**6, 27 << 22)]}
    assert leave_stream(some, 9, 0) == ["h1", "h2"]


def test_host_that_has_caught_up_with_a_slow_source_leaves_it() -> None:
    found = history(h1=("h0", 3, 0), h2=("h1", 0.3, 0), h3=("h2", 0.3, 0))
    assert skips(found, 6) == [("h3", "h2")]
    assert skips(history(h1=("h0", 3, 0), h2=("h1", 3, 0), h3=("h2", 2.5, 0)), 6) == []
    two = {host: [samples[5], samples[-1]] for host, samples in found.items()}
    assert skips(two, 6) == [("h3", "h2")], "a window may have no sample between its first and its last"
    behind = history(h1=("h0", 3, 0), h2=("h1", 0.3, 0), h3=("h2", 0.3, 0))
    behind["h2"] = [sample._replace(have=sample.have + 50) for sample in behind["h2"]]
    assert skips(behind, 6) == [], "there is still much to be had from it"
    assert skips({}, 6) == []


def test_what_came_at_the_beginning_of_the_window_counts() -> None:
    found = history(h1=("h0", 3, 0), h2=("h1", 0, 0), h3=("h2", 0, 0))
    begin = sharing._recent(found["h2"], 6, sharing.WINDOW_S)[0].at
    for host in ("h2", "h3"):
        found[host] = [sample._replace(have=sample.have + 12 * (sample.at > begin)) for sample in found[host]]
    assert skips(found, 6) == []
