# SPDX-License-Identifier: Apache-2.0
"""Images of a cluster, each for its own host: what they have in common is sent once to all, the rest to who
lacks it.
"""

from __future__ import annotations

import random
import time
from typing import Any, Dict, List

import pytest

from lab.cloud import STORE
from staging.test_faults import SLOWLY, ended
from staging.world import MiB, Staging, flip

COMMON, OWN = 6, 2
"""Extents of 4 MiB that all images have, and that each has for itself."""


def cluster(staging: Staging, name: str, count: int = 4, common: int = COMMON) -> List[int]:
    """Upload images that were one once: each has written to some places, and beyond."""
    images = []
    for number in range(count):
        path = staging.cloud.upload_file(f"{name}-{number}.img")
        shared, own = random.Random(name), random.Random(f"{name} {number}")
        with path.open("wb") as file:
            for index in range(common + OWN):
                dice = own if index in (3, common + OWN - 1) else shared
                file.seek(index * 2 * 4 * MiB)
                file.write(dice.randbytes(4 * MiB))
            file.truncate(128 * MiB)
        images.append(staging.cloud._upload(f"{name}-{number}", "raw", "OS", False, {}, STORE))
    return images


def words(images: List[int]) -> List[str]:
    return [f"{image}@h{number}" for number, image in enumerate(images, 1)]


def sent(staging: Staging) -> int:
    """Return what the network cards of all hosts have sent."""
    return sum(
        int(host.path("/sys/class/net/eth0/statistics/tx_bytes").read_text()) for host in staging.lab.hosts
    )


def good(staging: Staging, images: List[int], but: str = "") -> None:
    found = {f"h{number}": staging.has(f"h{number}", image) for number, image in enumerate(images, 1)}
    assert [host for host, has in found.items() if not has] == but.split()


def ideal(found: Dict[str, Any]) -> int:
    return int(found["common"]) + int(found["unique"])


def test_common_part_is_sent_once_and_each_own_part_to_its_host(staging: Staging) -> None:
    images = cluster(staging, "second")
    before = sent(staging)
    found = staging.command("stage", *words(images), "--compress", "none")[-1]
    between = sent(staging) - before
    assert found["complete"] and found["transports"] == ["multicast"]
    # What a host on a busy machine did not take in time and the sender repeated is sent twice by no plan.
    resent = int(found["common"] * found["stream"]["resent_percent"] / 100)
    assert (found["common"], found["unique"]) == (COMMON * 4 * MiB, 4 * OWN * 4 * MiB)
    assert found["bytes"]["store"] == ideal(found), "each extent once"
    assert found["stream"]["plain"] == found["common"]
    # What the sender read for the stream is not sent a second time; what each has for itself comes from the
    # store.
    read = found["bytes"]["store"]
    unique = read - found["stream"]["plain"]
    ratio = (between - resent + unique) / ideal(found)
    # With what the sender read: the common part is moved twice, from the store to it and from it to the
    # others.
    moved = (between + read) / ideal(found)
    at_least = (ideal(found) + found["common"]) / ideal(found)
    print(
        f"sent {between + unique} of ideally {ideal(found)}: {ratio:.3f}; with the sender's "
        f"reading {between + read}: {moved:.3f}"
    )
    assert ratio <= 1.1, (between, unique, found)
    assert at_least <= moved <= 1.1 * at_least + resent / ideal(found), (between, read, found)
    good(staging, images)
    assert staging.leftovers() == []


def test_hosts_that_have_the_template_get_only_what_is_new(staging: Staging) -> None:
    images = cluster(staging, "known", count=5)
    template, images = images[0], images[1:]
    staging.command("stage", str(template), "--all")
    before = sent(staging)
    found = staging.command("stage", *words(images))[-1]
    assert found["complete"] and found["common"] == 0 and found["unique"] == 4 * OWN * 4 * MiB
    assert found["bytes"]["here"] == 4 * COMMON * 4 * MiB and found["bytes"]["store"] == found["unique"]
    assert sent(staging) - before < 1 * MiB
    good(staging, images)


def test_host_that_has_the_template_sends_it_and_hosts_may_want_several(staging: Staging) -> None:
    images = cluster(staging, "several", count=5)
    staging.command("stage", str(images[0]), "--hosts", "h4")
    found = staging.command(
        "stage", f"{images[1]},{images[2]}@h1", f"{images[2]}@h2", f"{images[3]}@h3", f"{images[4]}@h4"
    )[-1]
    assert found["complete"] and found["sender"] == "h4"
    # Both h1 and h2 want the whole of the third image.
    assert (found["common"], found["unique"]) == ((COMMON + OWN) * 4 * MiB, 3 * OWN * 4 * MiB)
    assert found["bytes"]["store"] <= found["unique"] + OWN * 4 * MiB, "the template is not read"
    for host, image in (
        ("h1", images[1]),
        ("h1", images[2]),
        ("h2", images[2]),
        ("h3", images[3]),
        ("h4", images[4]),
    ):
        assert any(path.name.startswith(f"{STORE}-{image}-") for path in staging.bases(host)), (host, image)
    assert staging.leftovers() == []


def test_receiver_that_is_killed_midway_does_not_hold_the_others(staging: Staging) -> None:
    images = cluster(staging, "killed")
    run = staging.begin("stage", *words(images), *SLOWLY)
    run.midway()
    staging.lab.node("h3").kill()
    found = run.summary(code=1, timeout=200)
    assert [name for name, row in found["hosts"].items() if not row["ok"]] == ["h3"]
    assert found["bytes"]["store"] <= ideal(found), "nobody reads for the second time what another has"
    good(staging, images, but="h3")
    staging.lab.node("h3").start()
    ended(staging, 90)
    found = staging.command("stage", *words(images))[-1]
    assert found["complete"] and found["bytes"]["store"] <= ideal(found)
    good(staging, images)


@pytest.mark.long
def test_sender_that_is_killed_midway_is_replaced(staging: Staging) -> None:
    """Two suffice of the faults: what is streamed to whom makes no difference to those of test_faults.py."""
    images = cluster(staging, "replaced")
    run = staging.begin("stage", *words(images), *SLOWLY)
    run.midway()
    time.sleep(1)
    staging.lab.node("h1").kill()
    run.summary(code=1, timeout=200)
    good(staging, images, but="h1")
    staging.lab.node("h1").start()
    ended(staging, 90)


@pytest.mark.long
def test_sender_that_cannot_have_its_own_part_goes_on_sending_what_it_has(staging: Staging) -> None:
    """Three rounds, of which two are about h1 alone: as long as two of the faults."""
    images = cluster(staging, "rotten-sender", count=5)
    template, images = images[0], images[1:]
    staging.command("stage", str(template), "--hosts", "h1")
    # h1 finds that at once: the stream to the others takes longer than what it reads before.
    flip(staging.lab.fe.path(staging.cloud.source(images[0])), 3 * 2 * 4 * MiB)
    run = staging.begin("stage", *words(images), "--rate", "8M", "--compress", "none")
    found = run.summary(code=1, timeout=200)
    whats = [(event["event"], event.get("host")) for event in run.events]
    again = [number for number, what in enumerate(whats) if what[0] == "plan"][1]
    assert {("base", host) for host in ("h2", "h3", "h4")} <= set(whats[:again]), "in the first round"
    for host in ("h2", "h3", "h4"):
        assert set(found["hosts"][host]["sources"]) == {"stream", "store"}, "nothing was repaired"
    assert not found["hosts"]["h1"]["ok"] and "SS025" in found["hosts"]["h1"]["why"]
    good(staging, images, but="h1")
    assert staging.leftovers() == []


@pytest.mark.long
def test_chain_does_without_udpcast(staging: Staging) -> None:
    images = cluster(staging, "chained")
    found = staging.command("stage", *words(images), "--transport", "chain")[-1]
    assert found["complete"] and found["transports"] == ["chain"]
    assert found["bytes"]["store"] == ideal(found)
    good(staging, images)
    assert staging.leftovers() == []


def test_image_that_cannot_be_had_is_no_reason_to_have_no_other(staging: Staging) -> None:
    images = cluster(staging, "rotten", count=2)
    source = staging.lab.fe.path(staging.cloud.source(images[1]))
    with source.open("r+b") as file:
        file.seek(24 * MiB)
        file.write(b"x" * 4096)
    found = staging.command("stage", *words(images), code=0)[-1]
    # What was written to in place is another content: it is read whole and named anew, as a clone does.
    assert found["complete"]
    good(staging, images)
    source.chmod(0)
    found = staging.command("stage", f"{images[0]}@h3,h4", f"{images[1]}@h3", code=1)[-1]
    assert not found["complete"] and found["hosts"]["h4"]["ok"] and staging.has("h3", images[0])
    assert f"image {images[1]}" in found["hosts"]["h3"]["why"] and found["hosts"]["h3"]["lacks"] == [
        f"{STORE}-{images[1]}"
    ]
