# SPDX-License-Identifier: Apache-2.0
"""Deploys on cold hosts: the base comes from a peer, many at once are one chain, the store is read once,
faults cost little.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Dict

import pytest

from lab import moved as of_actions
from lab.cloud import DATASTORES, STORE, SYSTEM
from lab.oned.drivers import ActionFailed
from staging.world import MiB, Staging, flip


def moved(staging: Staging, calls: int) -> Dict[str, Dict[str, int]]:
    """Return, by host, what the clones since then say that they moved."""
    found: Dict[str, Dict[str, int]] = {}
    for call in staging.cloud.oned.calls[calls:]:
        if call.action == "clone":
            found.update(of_actions.by_host(call.stderr))
    return found


def right(staging: Staging, host: str, vm: int, image: int) -> None:
    disk = f"{DATASTORES}/{SYSTEM}/{vm}/disk.0"
    staging.lab.node(host).run(
        ["qemu-img", "compare", "-U", "-f", "qcow2", "-F", "raw", disk, staging.cloud.source(image)]
    )


def test_second_host_takes_the_base_from_the_first_and_the_store_is_read_once(staging: Staging) -> None:
    image = staging.image("peers")
    calls = len(staging.cloud.oned.calls)
    vms = [staging.deploy(f"peers-{host}", image, host) for host in ("h1", "h2")]
    seen = moved(staging, calls)
    assert seen["h1"]["store_read"] >= 24 * MiB and "received" not in seen["h1"]
    assert seen["h2"]["received"] >= 24 * MiB and "store_read" not in seen["h2"]
    for host, vm in zip(("h1", "h2"), vms):
        right(staging, host, vm, image)
        assert staging.has(host, image)
    assert staging.leftovers() == []


def test_source_that_has_become_dear_is_left_and_the_next_clone_knows(staging: Staging) -> None:
    """A peer whose cable is slow for the store, and the store for the peer when that has its cable back and
    the store is slow.
    """
    images = [
        staging.image(name, mib=128, data=data)
        for name, data in (("dear", 64), ("known", 24), ("flipped", 48))
    ]
    vms = [staging.deploy(f"on-h1-{image}", image, "h1") for image in images]
    calls = len(staging.cloud.oned.calls)
    staging.lab.node("h1").limit(16)
    vms.append(staging.deploy("dear", images[0], "h2"))
    seen = moved(staging, calls)["h2"]
    assert seen["received"] >= 4 * MiB and 24 * MiB < seen["store_read"] < 64 * MiB, "what came stays"
    calls = len(staging.cloud.oned.calls)
    vms.append(staging.deploy("known", images[1], "h2"))
    seen = moved(staging, calls)["h2"]
    assert "received" not in seen and seen["store_read"] >= 24 * MiB
    staging.lab.node("h1").limit(None)
    rates = staging.root("h2") / "holders" / "rates"
    now = time.time()
    rates.write_text(json.dumps({"h1": [100 * MiB, now], f"store {STORE}": [MiB, now]}))
    calls = len(staging.cloud.oned.calls)
    vms.append(staging.deploy("flipped", images[2], "h2"))
    seen = moved(staging, calls)["h2"]
    assert "store_read" not in seen and seen["received"] >= 48 * MiB
    assert json.loads(rates.read_text())["h1"][1] > now, "and is remembered"
    for image, vm in zip(images, vms[3:]):
        right(staging, "h2", vm, image)
    assert staging.leftovers() == []


def test_host_to_which_a_vm_moves_takes_the_base_from_its_peer(staging: Staging) -> None:
    image = staging.image("moves")
    vm = staging.deploy("moves", image, "h1")
    oned = staging.cloud.oned
    oned.vm_poweroff(vm, hard=True)
    calls = len(oned.calls)
    oned.vm_migrate(vm, "h3")
    told = "".join(call.stderr for call in oned.calls[calls:] if call.action == "mv")
    seen = of_actions.by_host(told)["h3"]
    assert seen["received"] >= 10 * MiB and "store_read" not in seen
    assert re.search(r"INFO: mv: VM \d+: h3: [\d.]+ MiB received from h1 in \d+\.\d s \(", told)
    right(staging, "h3", vm, image)
    assert staging.has("h3", image) and staging.leftovers() == []
    # Whoever has it is known now.
    calls = len(oned.calls)
    staging.lab.node("h1").run(["rm", "-r", f"{DATASTORES}/.semishared/bases"])
    other = staging.deploy("after", image, "h2")
    assert "store_read" not in moved(staging, calls)["h2"]
    right(staging, "h2", other, image)


def test_content_that_one_host_had_to_read_whole_comes_to_the_others_from_there(staging: Staging) -> None:
    image = staging.image("written")
    with staging.lab.fe.path(staging.cloud.source(image)).open("r+b") as file:
        file.write(b"another session")
    calls = len(staging.cloud.oned.calls)
    vms = [staging.deploy(f"written-{host}", image, host) for host in ("h1", "h2")]
    seen = moved(staging, calls)
    assert seen["h1"]["store_read"] >= 24 * MiB
    assert seen["h2"]["received"] >= 24 * MiB and "store_read" not in seen["h2"]
    for host, vm in zip(("h1", "h2"), vms):
        right(staging, host, vm, image)
    assert staging.leftovers() == []


def test_many_cold_hosts_at_once_are_one_chain(staging: Staging) -> None:
    image = staging.image("storm", mib=128, data=40)
    calls = len(staging.cloud.oned.calls)
    with ThreadPoolExecutor(8) as pool:
        places = [(f"storm-{number}", image, staging.names[number % 4]) for number in range(8)]
        vms = list(pool.map(lambda place: staging.deploy(*place), places))
    clones = [call.stderr for call in staging.cloud.oned.calls[calls:] if call.action == "clone"]
    read = sum(of_actions.total(text, "store_read") for text in clones)
    assert read == 40 * MiB, "once"
    for (_, _, host), vm in zip(places, vms):
        right(staging, host, vm, image)
    assert staging.leftovers() == []


def test_damaged_extent_of_a_peer_comes_from_elsewhere(staging: Staging) -> None:
    image = staging.image("rotten")
    staging.deploy("rotten-1", image, "h1")
    (base,) = staging.bases("h1")
    flip(base / "image", 5)
    calls = len(staging.cloud.oned.calls)
    vm = staging.deploy("rotten-2", image, "h2")
    seen = moved(staging, calls)["h2"]
    assert seen["received"] >= 19 * MiB and seen["store_read"] == 4 * MiB, "one extent"
    right(staging, "h2", vm, image)
    assert staging.has("h2", image)


@pytest.mark.parametrize("fault", ["cut", "gone", pytest.param("killed", marks=pytest.mark.long)])
def test_peer_that_fails_costs_seconds_and_the_store_is_the_last_resort(staging: Staging, fault: str) -> None:
    image = staging.image(f"lost-{fault}")
    staging.cloud.terminate(staging.deploy(f"lost-{fault}", image, "h1"))
    host = staging.lab.node("h1")
    if fault == "cut":
        host.cut()
    elif fault == "killed":
        host.kill()
    else:
        staging.command("base", "evict", str(image), "--hosts", "h1")
    started = time.monotonic()
    vm = staging.deploy(f"lost-{fault}-2", image, "h2")
    assert time.monotonic() - started < 60
    right(staging, "h2", vm, image)
    assert staging.has("h2", image)


def test_full_host_refuses_a_base_and_keeps_its_others(staging: Staging) -> None:
    first, second = staging.image("fits"), staging.image("fits-not")
    staging.cloud.terminate(staging.deploy("fits", first, "h1"))
    conf = staging.lab.fe.path("/var/lib/one/remotes/etc/semishared.conf")
    text = conf.read_text()
    try:
        conf.write_text(text.replace("size_limit = none", "size_limit = 40M"))
        vm = staging.deploy("evicts", second, "h1")
        assert [path.name.split("-")[1] for path in staging.bases("h1")] == [str(second)], "room was made"
        with pytest.raises(ActionFailed, match=r"SS030 .*no space for a base of .* on h1"):
            staging.deploy("no-room", first, "h1")
        right(staging, "h1", vm, second)
    finally:
        conf.write_text(text)
    assert staging.leftovers() == []
