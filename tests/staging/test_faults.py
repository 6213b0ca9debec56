# SPDX-License-Identifier: Apache-2.0
"""Sessions with a fault in the middle: the healthy hosts have the image, nobody takes a wrong byte, and
nothing outlives them.

The rate limit makes each transfer last some seconds, so that there is a middle.
"""

from __future__ import annotations

import fcntl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Dict, List

import pytest

from lab.cloud import DATASTORES, RECORDS
from staging.world import COMMAND, MiB, Run, Staging

SLOWLY = ("--rate", "4M", "--compress", "none")
"""About 6 s for the 24 MiB of an image."""
PROGRAMS = ("udp-sender", "udp-receiver", "hostside.py", "semishared stage")


def prepared(staging: Staging, name: str, data: int = 24) -> int:
    """Return an image that h1 has: it will be the sender."""
    image = staging.image(name, mib=64, data=data)
    staging.command("stage", str(image), "--hosts", "h1")
    return image


def good(staging: Staging, image: int, hosts: str) -> None:
    assert [host for host in hosts.split() if not staging.has(host, image)] == []


def ended(staging: Staging, within_s: float = 20) -> None:
    """Wait until nothing of any session runs on any node."""
    deadline = time.monotonic() + within_s
    while True:
        left = staging.processes(*PROGRAMS)
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def pids(staging: Staging, host: str, name: str) -> List[str]:
    done = staging.lab.node(host).run(
        ["pgrep", "-x" if name.startswith("udp") else "-f", name], user="root", check=False
    )
    return done.stdout.decode().split()


def signal(staging: Staging, host: str, name: str, number: str) -> None:
    found = pids(staging, host, name)
    assert found, f"no {name} on {host}"
    staging.lab.node(host).run(["kill", f"-{number}", *found], user="root", check=False)


def why(found: Dict[str, Any], host: str) -> str:
    return " ".join([*found["hosts"][host]["troubles"], found["hosts"][host]["why"]])


@pytest.mark.parametrize("fault", ["killed", "stopped", pytest.param("ended", marks=pytest.mark.long)])
def test_receiver_that_dies_midway_does_not_hold_the_others(staging: Staging, fault: str) -> None:
    die_midway(staging, fault)


def die_midway(staging: Staging, fault: str) -> None:
    """Let h3 die in the middle of a stream to h2, h3 and h4."""
    image = prepared(staging, f"receiver-{fault}")
    run = staging.begin("stage", str(image), "--transport", "multicast", *SLOWLY)
    run.midway()
    begun = time.monotonic()
    host = staging.lab.node("h3")
    if fault == "killed":
        host.kill()
    elif fault == "cut":
        host.cut()
    else:
        signal(staging, "h3", "udp-receiver", "STOP" if fault == "stopped" else "KILL")
    run.wait_for(lambda event: event["event"] == "host" and event["host"] == "h2" and event["done"])
    run.wait_for(lambda event: event["event"] == "host" and event["host"] == "h4" and event["done"])
    assert time.monotonic() - begun < 40, "6 s and a second on an idle machine"
    found = run.summary(code=0 if fault in ("stopped", "ended") else 1, timeout=150)
    lost = [name for name, row in found["hosts"].items() if not row["ok"]]
    assert lost == ([] if fault in ("stopped", "ended") else ["h3"])
    good(staging, image, "h1 h2 h4" if lost else "h1 h2 h3 h4")
    if fault == "ended":
        assert found["hosts"]["h3"]["sources"]["stream"]["extents"] > 0
        assert any(source.startswith("h") for source in found["hosts"]["h3"]["sources"]), (
            "the rest came from a peer"
        )
    assert found["bytes"]["store"] == 0
    # Who is cut off finds nobody any more, and ends.
    ended(staging, 90)


def test_slow_receiver_leaves_the_stream_and_gets_the_rest_from_a_peer(staging: Staging) -> None:
    image = prepared(staging, "slow")
    staging.lab.node("h3").limit(8)
    run = staging.begin("stage", str(image), "--transport", "multicast", "--rate", "8M", "--compress", "none")
    for host in ("h2", "h4"):
        run.wait_for(
            lambda event, host=host: event["event"] == "host" and event["host"] == host and event["done"]  # type: ignore[misc]
        )
    healthy = time.monotonic()
    found = run.summary(timeout=200)
    assert time.monotonic() - healthy > 5, "it was slow, and the others did not wait for it"
    assert any(
        event["event"] == "note" and event["host"] == "h3" and "leaves the stream" in event["text"]
        for event in run.events
    )
    assert found["hosts"]["h3"]["sources"].keys() - {"stream"}
    good(staging, image, "h1 h2 h3 h4")
    ended(staging)


def test_sender_that_dies_midway_is_replaced_and_the_store_gives_only_the_rest(staging: Staging) -> None:
    image = prepared(staging, "sender")
    run = staging.begin("stage", str(image), "--hosts", "h2,h3,h4,h1", "--transport", "auto", *SLOWLY)
    run.midway()
    time.sleep(1)
    signal(staging, "h1", "udp-sender", "KILL")
    run.wait_for(lambda event: event["event"] == "note" and event["host"] == "h1")
    found = run.summary(timeout=150)
    assert found["bytes"]["store"] == 0, "h1 lives: peers serve the rest"
    good(staging, image, "h1 h2 h3 h4")
    ended(staging)


def test_lost_sender_is_replaced_by_one_that_reads_only_the_rest_from_the_store(staging: Staging) -> None:
    image = prepared(staging, "lost-sender")
    run = staging.begin("stage", str(image), *SLOWLY)
    run.midway()
    time.sleep(1)
    staging.lab.node("h1").kill()
    found = run.summary(timeout=150)
    assert found["complete"], "h1 had it, and has it on its disk"
    assert 0 < found["bytes"]["store"] < 64 * MiB, found["bytes"]
    assert len(found["transports"]) >= 2
    good(staging, image, "h2 h3 h4")
    ended(staging)


BLOCKED = [
    pytest.param("udp dport 9000-9300", id="ports"),
    pytest.param("ip daddr 224.0.0.0/4", id="group", marks=pytest.mark.long),
]


@pytest.mark.parametrize("rule", BLOCKED)
def test_network_without_multicast_is_noticed_in_seconds_and_a_chain_takes_over(
    staging: Staging, rule: str
) -> None:
    image = prepared(staging, f"blocked-{len(rule)}")
    for host in ("h2", "h3", "h4"):
        staging.lab.node(host).drop(rule)
    started = time.monotonic()
    run = staging.begin("stage", str(image), *SLOWLY)
    run.wait_for(
        lambda event: event["event"] == "host" and event["source"].startswith("h") and event["have"] > 0
    )
    assert time.monotonic() - started < 45, "seconds, on an idle machine"
    found = run.summary()
    assert found["complete"] and found["bytes"]["store"] == 0 and found["bytes"]["peers"] > 0
    assert "stream" in why(found, "h2")
    good(staging, image, "h1 h2 h3 h4")
    ended(staging)


def test_loss_of_packets_costs_nothing_but_time(staging: Staging) -> None:
    image = prepared(staging, "loss")
    for host in ("h2", "h3", "h4"):
        staging.lab.node(host).drop("numgen random mod 1000 < 10")
    found = staging.begin("stage", str(image), "--transport", "multicast", "--rate", "8M").summary()
    assert found["complete"] and found["stream"]["resent_percent"] > 0
    good(staging, image, "h1 h2 h3 h4")


def test_foreign_stream_on_the_port_is_not_taken(staging: Staging) -> None:
    image = prepared(staging, "foreign")
    host = staging.lab.node("h2")
    # All ports but one are taken, so that the foreign sender knows which one it will be.
    locks = staging.lab.fe.path(f"{DATASTORES}/{RECORDS}/locks")
    with ExitStack() as stack:
        for number in range(1, 100):
            file = stack.enter_context(open(locks / f"port-{9000 + 2 * number}", "w"))
            staging.cloud.give(locks / f"port-{9000 + 2 * number}")
            fcntl.flock(file, fcntl.LOCK_EX)
        foreign = staging.lab.fe.popen(
            [
                "sh",
                "-c",
                "head -c 20000000 /dev/urandom | udp-sender --nokbd --interface eth0 --portbase "
                "9000 --min-receivers 3"
                " --max-wait 5 --start-timeout 30 --max-bitrate 40m",
            ]
        )
        deadline = time.monotonic() + 60
        while staging.lab.fe.run(["pgrep", "-x", "udp-sender"], check=False).returncode:
            assert time.monotonic() < deadline and foreign.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        found = staging.begin("stage", str(image), "--transport", "multicast", *SLOWLY).summary()
        foreign.kill()
        foreign.wait()
    assert found["complete"] and host.up
    assert "stream of another session" in " ".join(why(found, name) for name in ("h2", "h3", "h4"))
    good(staging, image, "h1 h2 h3 h4")


def test_concurrent_sessions_do_not_meet(staging: Staging) -> None:
    images = [prepared(staging, f"both-{number}") for number in range(2)]

    def stage(image: int) -> Dict[str, Any]:
        return staging.begin("stage", str(image), "--transport", "multicast", *SLOWLY).summary()

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(stage, images):
            assert found["complete"] and found["bytes"]["stream"] > 24 * MiB and found["bytes"]["store"] == 0
            assert not any("session" in why(found, host) for host in found["hosts"]), (
                "each has got its own stream"
            )
    for image in images:
        good(staging, image, "h1 h2 h3 h4")
    ended(staging)


def test_second_session_for_the_same_image_says_busy_or_waits(staging: Staging) -> None:
    image = prepared(staging, "twice")
    first = staging.begin("stage", str(image), "--rate", "1M", "--compress", "none")
    first.midway()
    busy = staging.begin("stage", str(image), "--hosts", "h2")
    waiting = staging.begin("stage", str(image), "--hosts", "h2,h3", "--wait")
    assert "SS052" in busy.summary(code=1)["hosts"]["h2"]["why"]
    assert first.summary()["complete"] and waiting.summary()["complete"]
    assert sum(waiting.summary()["bytes"].values()) == 0, "nothing was sent twice"


@pytest.mark.parametrize(
    "who", ["command", *(pytest.param(who, marks=pytest.mark.long) for who in ("receiver", "sender"))]
)
def test_nothing_outlives_its_session_whoever_is_killed(staging: Staging, who: str) -> None:
    image = prepared(staging, f"outlives-{who}")
    run = staging.begin("stage", str(image), "--transport", "multicast", "--rate", "1M", "--compress", "none")
    run.midway()
    if who == "command":
        signal(staging, "fe", COMMAND, "KILL")
        run.process.wait(30)
        ended(staging, 30)
        staging.command("stage", str(image))
    else:
        signal(staging, "h2" if who == "receiver" else "h1", "hostside.py", "KILL")
        host = "h2" if who == "receiver" else "h1"
        deadline = time.monotonic() + 10
        while pids(staging, host, "udp-receiver") + pids(staging, host, "udp-sender"):
            assert time.monotonic() < deadline, "its programs die with it"
            time.sleep(0.1)
        run.summary(timeout=150)
    good(staging, image, "h1 h2 h3 h4")
    ended(staging)


def test_host_that_dies_in_a_chain_is_gone_round(staging: Staging) -> None:
    die_in(staging, "chain")


def die_in(staging: Staging, transport: str) -> None:
    """Let h2 die while h3 takes from it, or from h1."""
    image = prepared(staging, f"link-{transport}")
    run = staging.begin("stage", str(image), "--transport", transport, *SLOWLY)
    run.midway("h2" if transport == "chain" else "h1", "h3" if transport == "chain" else "h2")
    staging.lab.node("h2").kill()
    found = run.summary(code=1, timeout=200)
    assert [name for name, row in found["hosts"].items() if not row["ok"]] == ["h2"]
    assert found["bytes"]["store"] == 0
    good(staging, image, "h1 h3 h4")
    ended(staging)


def test_slow_host_in_a_chain_is_gone_round(staging: Staging) -> None:
    # Not the first one: by what the host before it gets it is known to be slow.
    image = prepared(staging, "slow-link", data=40)
    staging.lab.node("h3").limit(8)
    run = staging.begin("stage", str(image), "--transport", "chain", "--rate", "8M", "--compress", "none")
    run.wait_for(lambda event: event["event"] == "host" and event["host"] == "h4" and event["done"], 100)
    third = [event for event in run.events if event["event"] == "host" and event["host"] == "h3"][-1]
    assert not third["done"], "h4 comes after h3 in the chain, and had it before"
    run.summary(timeout=150)
    good(staging, image, "h1 h2 h3 h4")


def test_rate_limit_is_kept(staging: Staging) -> None:
    keeps_rate(staging, "multicast")


def keeps_rate(staging: Staging, transport: str) -> None:
    """Look at what the sender's network card sends."""
    image = prepared(staging, f"rate-{transport}")
    rate, sent = 4 * MiB, staging.lab.node("h1").path("/sys/class/net/eth0/statistics/tx_bytes")
    run: Run = staging.begin(
        "stage", str(image), "--transport", transport, "--rate", "4M", "--compress", "none"
    )
    run.midway("stream" if transport == "multicast" else "h1", "h2")
    first, begun = int(sent.read_text()), time.monotonic()
    time.sleep(2)
    speed = (int(sent.read_text()) - first) / (time.monotonic() - begun)
    # Slower is the affair of a busy machine, within reason.
    assert 0.25 * rate < speed < 1.05 * rate, f"{speed / rate:.2f} of the limit"
    run.summary()
