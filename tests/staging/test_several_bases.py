# SPDX-License-Identifier: Apache-2.0
"""Sessions of several bases for one host: each is in use as soon as it is whole, and sessions that overlap
help each other.

What is told when is the order of events; how long it takes is no matter.
"""

from __future__ import annotations

from staging.test_faults import COMMAND, ended, good, signal
from staging.test_peers import moved, right
from staging.world import MiB, Run, Staging

CRAWLING = ("--rate", "512K", "--compress", "none", "--transport", "unicast")
"""An extent in 8 s: with ten left to come, what happens before the end of a session happens in its middle."""


def first_of_two(staging: Staging, name: str, hosts: str = "h1") -> tuple[int, int, Run]:
    """Begin a session of two bases of which the first is small and the second will not be there soon; return
    when the first is.
    """
    first, second = staging.image(f"{name}-first", mib=8, data=4), staging.image(f"{name}-second", data=40)
    run = staging.begin("stage", f"{first},{second}@{hosts}", *CRAWLING)
    for host in hosts.split(","):
        run.wait_for(lambda event, host=host: event["event"] == "base" and event["host"] == host)  # type: ignore[misc]
    return first, second, run


def test_cold_clone_of_the_first_base_does_not_wait_for_the_second(staging: Staging) -> None:
    first, second, run = first_of_two(staging, "clone")
    vm = staging.deploy("clone", first, "h1")
    right(staging, "h1", vm, first)
    calls = len(staging.cloud.oned.calls)
    other = staging.deploy("clone-peer", first, "h2")
    right(staging, "h2", other, first)
    assert "store_read" not in moved(staging, calls).get("h2", {})
    assert not any(event["event"] == "summary" for event in run.events) and not staging.has("h1", second)
    # The session is killed: what has come of the second base is gone on with.
    signal(staging, "fe", COMMAND, "KILL")
    run.process.wait(30)
    ended(staging, 30)
    found = staging.command("stage", f"{first},{second}@h1")[-1]
    assert found["complete"] and found["bytes"]["store"] <= 40 * MiB
    good(staging, second, "h1")
    assert staging.leftovers() == []


def test_two_sessions_with_overlapping_sets_in_opposite_order(staging: Staging) -> None:
    images = [staging.image(f"opposite-{number}", data=16) for number in range(3)]
    one, two, three = images
    runs = [
        staging.begin("stage", f"{one},{two}@h1,h2", "--wait", "--rate", "8M"),
        staging.begin("stage", f"{three},{two},{one}@h2,h1", "--wait", "--rate", "8M"),
    ]
    found = [run.summary(timeout=200) for run in runs]
    assert all(summary["complete"] for summary in found)
    for image in images:
        good(staging, image, "h1 h2")
    assert sum(summary["bytes"]["store"] for summary in found) == 3 * 16 * MiB, (
        "each image is read once, whoever of the two did"
    )
    ended(staging)
    assert staging.leftovers() == []
