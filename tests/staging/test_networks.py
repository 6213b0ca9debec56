# SPDX-License-Identifier: Apache-2.0
"""Machines with two networks: which of them carries bulk data, by the counters of their cards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lab import Node
from lab.cloud import SYSTEM
from staging.test_stage import DATA, check, summary
from staging.world import MiB, Staging

NETWORK = "10.77.3"
PROBE = ["/usr/bin/python3", "-I", "/var/tmp/one/lib/semishared/host/probe.py"]
CONF, HOSTS_CONF = "/var/lib/one/remotes/etc/semishared.conf", "/var/tmp/one/etc/semishared.conf"
SMALL = 3 * MiB
"""More than plans, questions and answers of a session take, and ssh for them; less than any data here."""


class Cards:
    """What each machine's two cards have carried since."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self._before = self._now()

    def _now(self) -> Mapping[tuple[str, str], int]:
        return {(node.name, card): node.carried(card) for node in self.nodes for card in ("eth0", "eth1")}

    def carried(self) -> dict[tuple[str, str], int]:
        """Return the bytes by machine and card, and begin anew."""
        before, self._before = self._before, self._now()
        return {key: count - before[key] for key, count in self._before.items()}


def tell(staging: Staging, names: list[str]) -> None:
    """Let oned know what the probes of hosts say, as its monitoring does."""
    oned = staging.cloud.oned
    for name in names:
        host = staging.lab.node(name)
        oned.host_update(oned.host(name).id, host.run(PROBE).stdout.decode().splitlines()[-1])


def forget(staging: Staging, names: list[str]) -> None:
    for name in names:
        staging.cloud.oned.host(name).template.pop("SEMISHARED", None)


@contextmanager
def changed(path: Path, old: str, new: str) -> Iterator[None]:
    """Let a semishared.conf have another line."""
    before = path.read_text()
    path.write_text(before.replace(old, new))
    try:
        yield
    finally:
        path.write_text(before)


@pytest.fixture
def cards(staging: Staging) -> Iterator[Cards]:
    nodes = [staging.lab.fe, *staging.lab.hosts]
    known = [node.path("/var/lib/one/.ssh/known_hosts") for node in nodes]
    key = known[0].read_text()
    for number, node in enumerate(nodes):
        node.add_card(f"{NETWORK}.{number + 1}")
        # A site's has the names of hosts, and none of these addresses.
        known[number].write_text(key.replace("* ", ",".join(other.name for other in nodes) + " ", 1))
    tell(staging, staging.names)
    # Hosts need not know it.
    with changed(staging.lab.fe.path(CONF), "bulk = none", f"bulk = {NETWORK}.0/24"):
        yield Cards(nodes)
    forget(staging, staging.names)
    for path, node in zip(known, nodes):
        path.write_text(key)
        node.remove_card()


@pytest.mark.parametrize(("transport", "trusted"), [("multicast", "no"), ("chain", "no"), ("chain", "yes")])
def test_bases_go_from_host_to_host_over_the_network_for_them(
    staging: Staging, cards: Cards, transport: str, trusted: str
) -> None:
    image = staging.image(f"net-{transport}-{trusted}")
    cards.carried()
    words = ("stage", str(image), "--all", "--transport", transport, "--compress", "none")
    with ExitStack() as stack:
        for host in staging.lab.hosts:
            what = ("trusted_network = no", f"trusted_network = {trusted}")
            stack.enter_context(changed(host.path(HOSTS_CONF), *what))
        found = summary(staging.command(*words))
    assert found["complete"] and found["transports"] == [transport], found
    carried = cards.carried()
    for name in staging.names:
        assert carried[name, "eth1"] >= DATA, (name, carried)
        assert carried[name, "eth0"] < SMALL, (name, carried)
    check(staging, image, "h1 h2 h3 h4")


def test_a_deploy_takes_its_base_from_a_peer_over_that_network(staging: Staging, cards: Cards) -> None:
    image = staging.image("net-deploy")
    summary(staging.command("stage", str(image), "--hosts", "h1"))
    cards.carried()
    staging.cloud.terminate(staging.deploy("net-deploy", image, "h2"))
    carried = cards.carried()
    for name in ("h1", "h2"):
        assert carried[name, "eth1"] >= DATA and carried[name, "eth0"] < SMALL, (name, carried)


def test_a_network_that_does_not_lead_there_is_passed_by(staging: Staging, cards: Cards) -> None:
    """The address that h3 has told before is not there any more, and h2 never had one."""
    image = staging.image("net-broken")
    summary(staging.command("stage", str(image), "--hosts", "h3"))
    forget(staging, ["h2"])
    host = staging.cloud.oned.host("h3").template["SEMISHARED"]
    assert isinstance(host, dict)
    host["ADDRESSES"] = f"{NETWORK}.99"
    events = staging.command("stage", str(image), "--hosts", "h2")
    found = summary(events)
    assert found["complete"] and found["bytes"]["store"] == 0 and found["bytes"]["peers"] >= DATA, found
    (trouble,) = found["hosts"]["h2"]["troubles"]
    assert re.match(r"h3 by its name, not at 10\.77\.3\.99 \(\[network\] bulk\): \S", trouble)
    notes = [event["text"] for event in events if event["event"] == "note" and event["host"] == "h2"]
    assert f"no address in {NETWORK}.0/24 ([network] bulk) is known of it: by its name" in notes
    check(staging, image, "h2")


def test_a_live_move_takes_files_disks_and_memory_over_that_network(staging: Staging, cards: Cards) -> None:
    cloud = staging.cloud
    own = {"TYPE": "fs", "SIZE": "32", "FORMAT": "qcow2"}
    vm = cloud.deploy("net-move", [{"IMAGE_ID": str(cloud.os_image("net-os"))}, own], "h1")
    guest = cloud.guest(vm)
    guest.write("vdb", "own", 0, 8 << 10)
    guest.loop("vdb", "loop", 16 << 10, 8 << 10, 20)
    cards.carried()
    cloud.oned.vm_migrate(vm, "h2", SYSTEM, how="live")
    carried = cards.carried()
    for name in ("h1", "h2"):
        assert carried[name, "eth1"] >= 8 * MiB, (name, carried)
        assert carried[name, "eth0"] < SMALL, (name, carried)
    assert carried["fe", "eth1"] >= 16 * MiB, "the directory, in and out"
    guest = cloud.guest(vm)
    guest.check("vdb", "own", 0, 8 << 10)
    counts = guest.loop_stop("vdb")
    assert (counts["errors"], counts["mismatches"]) == (0, 0), counts
    cloud.terminate(vm)
