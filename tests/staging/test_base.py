# SPDX-License-Identifier: Apache-2.0
"""`semishared base`, as an operator runs it: all hosts at once, damage mended under VMs, limits kept, a dead
host reported.
"""

from __future__ import annotations

import time

from lab.cloud import DATASTORES, SYSTEM
from staging.world import Staging, flip, rows


def test_bases_are_listed_pruned_and_evicted_on_all_hosts(staging: Staging) -> None:
    first, second = staging.image("first"), staging.image("second")
    for host in ("h1", "h2"):
        staging.deploy(f"one-{host}", first, host)
    staging.cloud.terminate(staging.deploy("short", second, "h1"))
    listed = staging.command("base", "list")
    assert sorted(
        (row["host"], row["name"].split("-")[1], len(row["leases"])) for row in listed["bases"]
    ) == [("h1", str(first), 1), ("h1", str(second), 0), ("h2", str(first), 1)]
    conf = staging.lab.fe.path("/var/lib/one/remotes/etc/semishared.conf")
    text = conf.read_text()
    try:
        conf.write_text(text.replace("size_limit = none", "size_limit = 1M"))
        would = staging.command("base", "prune", "--dry-run", code=1)
        assert [(row["host"], row["name"].split("-")[1]) for row in would["bases"]] == [("h1", str(second))]
        assert len(staging.command("base", "list")["bases"]) == 3, "nothing was removed"
        pruned = staging.command("base", "prune")
        assert [(row["host"], row["evicted"]) for row in pruned["bases"]] == [("h1", True)]
    finally:
        conf.write_text(text)
    assert staging.has("h1", first) and staging.has("h2", first), "leased bases stay, whatever the limit"
    stays = staging.command("base", "evict", "first", code=1)
    assert [row["evicted"] for row in stays["bases"]] == [False, False]
    for vm in list(staging.cloud.oned.vms.values()):
        if staging.cloud.oned.state(vm.id)[0] != "DONE":
            staging.cloud.terminate(vm.id)
    gone = staging.command("base", "evict", str(first), "--hosts", "h2")
    assert [(row["host"], row["evicted"]) for row in gone["bases"]] == [("h2", True)]
    assert staging.has("h1", first) and not staging.bases("h2")


def test_bit_flipped_at_rest_is_found_and_mended_under_a_vm(staging: Staging) -> None:
    image = staging.image("flipped")
    vm = staging.deploy("flipped", image, "h1")
    staging.deploy("good", image, "h2")
    (base,) = staging.bases("h1")
    flip(base / "image", 5)
    assert not staging.has("h1", image)
    found = rows(staging.command("base", "verify", code=1))
    assert (found["h1"]["bad"], found["h1"]["damaged"], found["h1"]["mended"]) == ([0], True, True)
    assert found["h1"]["leases"] == [f"{vm}-0"], "who has read from it"
    assert not found["h2"]["damaged"]
    assert staging.has("h1", image)
    disk = f"{DATASTORES}/{SYSTEM}/{vm}/disk.0"
    host = staging.lab.node("h1")
    host.run(["qemu-img", "compare", "-U", "-f", "qcow2", "-F", "raw", disk, staging.cloud.source(image)])
    assert not any(row["damaged"] for row in staging.command("base", "verify", "--rate", "100M")["bases"])


def test_dead_host_is_reported_in_seconds_and_the_others_are_asked(staging: Staging) -> None:
    image = staging.image("alone")
    staging.deploy("alone", image, "h1")
    staging.lab.node("h3").cut()
    started = time.monotonic()
    answer = staging.command("base", "list", code=2)
    assert time.monotonic() - started < 30
    assert [error["host"] for error in answer["errors"]] == ["h3"] and "h3" in answer["errors"][0]["error"]
    assert [row["host"] for row in answer["bases"]] == ["h1"]
