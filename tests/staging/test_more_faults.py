# SPDX-License-Identifier: Apache-2.0
"""The rest of the faults: like those of test_faults.py, and as long."""

from __future__ import annotations

from lab.cloud import DATASTORES, RECORDS
from staging.test_faults import SLOWLY, die_in, die_midway, ended, good, keeps_rate, prepared
from staging.world import Staging


def test_receiver_that_is_cut_off_midway_does_not_hold_the_others(staging: Staging) -> None:
    die_midway(staging, "cut")


def test_host_that_dies_while_all_take_from_the_sender_is_said(staging: Staging) -> None:
    die_in(staging, "unicast")


def test_rate_limit_is_kept_in_a_chain(staging: Staging) -> None:
    keeps_rate(staging, "chain")


def test_late_receiver_is_repaired(staging: Staging) -> None:
    image = prepared(staging, "late")
    staging.lab.node("h4").cut()
    run = staging.begin("stage", str(image), *SLOWLY)
    run.midway()
    staging.lab.node("h4").join()
    found = run.summary(timeout=150)
    assert "stream" not in found["hosts"]["h4"]["sources"]
    good(staging, image, "h1 h2 h3 h4")
    ended(staging)


def test_host_with_a_full_disk_is_said_and_the_others_have_it(staging: Staging) -> None:
    image = prepared(staging, "full")
    host, place = staging.lab.node("h3"), f"{DATASTORES}/{RECORDS}"
    host.run(["mkdir", "-p", place])
    host.run(
        [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size=12m,mode=755,uid={staging.lab.uid},gid={staging.lab.gid}",
            "small",
            place,
        ],
        user="root",
    )
    conf = staging.lab.fe.path("/var/lib/one/remotes/etc/semishared.conf")
    text = conf.read_text()
    try:
        # Without a floor, so that it is the disk that says it.
        conf.write_text(text.replace("free_floor = 5%", "free_floor = none"))
        found = staging.begin("stage", str(image), *SLOWLY).summary(code=1)
        assert "SS030" in found["hosts"]["h3"]["why"]
        assert not list((staging.root("h3") / "staging").glob("*/image")), (
            "what has come does not fill the disk for others"
        )
    finally:
        conf.write_text(text)
        host.run(["umount", "-l", place], user="root")
    good(staging, image, "h1 h2 h4")


def test_one_host_behind_a_firewall_does_not_hold_the_others(staging: Staging) -> None:
    image = prepared(staging, "firewall")
    staging.lab.node("h3").drop("udp dport 9000-9300")
    found = staging.begin("stage", str(image), *SLOWLY).summary()
    assert found["complete"]
    assert "stream" in found["hosts"]["h2"]["sources"] and "stream" not in found["hosts"]["h3"]["sources"]
    good(staging, image, "h1 h2 h3 h4")
