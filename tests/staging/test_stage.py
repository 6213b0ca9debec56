# SPDX-License-Identifier: Apache-2.0
"""`semishared stage` by every transport: verified bases on all hosts, the store read once, nothing sent
twice, exit codes.
"""

from __future__ import annotations

import json
import time
from typing import Any, Dict, List

import pytest

from staging.world import COMMAND, MiB, Staging, flip

DATA = 24 * MiB


def summary(events: List[Dict[str, Any]]) -> Dict[str, Any]:
    """Return the last line of a run, which sums it up."""
    assert events[-1]["event"] == "summary", events
    return events[-1]


def check(staging: Staging, image: int, hosts: str) -> None:
    for host in hosts.split():
        assert staging.has(host, image), host
    assert staging.leftovers() == []


@pytest.mark.parametrize(
    ("transport", "compress"), [("multicast", "zstd"), ("chain", "none"), ("unicast", "lzop")]
)
def test_image_comes_to_all_hosts_and_the_store_is_read_once(
    staging: Staging, transport: str, compress: str
) -> None:
    image = staging.image(f"{transport}-{compress}")
    events = staging.command("stage", str(image), "--all", "--transport", transport, "--compress", compress)
    found = summary(events)
    assert found["complete"] and found["transports"] == [transport], found
    assert found["bytes"]["store"] == DATA, "one host's"
    assert list(found["hosts"]) == staging.names
    if transport == "multicast":
        assert found["bytes"]["stream"] >= 3 * DATA and found["bytes"]["peers"] == 0
        assert found["stream"]["codec"] == compress
    else:
        assert found["bytes"]["peers"] >= 3 * DATA
    assert any(event["event"] == "host" and event["source"] for event in events), "progress was told"
    check(staging, image, "h1 h2 h3 h4")
    again = summary(staging.command("stage", str(image), "--transport", transport))
    assert again["complete"] and again["transports"] == [] and sum(again["bytes"].values()) == 0
    assert staging.lab.fe.path("/var/lib/one/datastores/.semishared/holders").is_dir()


def test_sender_is_a_host_that_has_it_and_the_store_is_not_read(staging: Staging) -> None:
    image = staging.image("held")
    staging.cloud.terminate(staging.deploy("held", image, "h3"))
    found = summary(staging.command("stage", "held"))
    assert (found["transports"], found["sender"], found["bytes"]["store"]) == (["multicast"], "h3", 0)
    assert found["stream"]["codec"] == "none", "random data: nothing pays"
    check(staging, image, "h1 h2 h3 h4")


def test_named_hosts_only_and_what_is_partly_there_is_gone_on_with(staging: Staging) -> None:
    image = staging.image("partly")
    summary(staging.command("stage", str(image), "--hosts", "h1"))
    assert not staging.bases("h2")
    # What a killed receiver leaves: some extents, and the journal that names them.
    (base,) = staging.bases("h1")
    partial = staging.root("h2") / "staging" / base.name.rpartition("-")[0]
    (partial / "leases").mkdir(parents=True)
    for name in ("image", "manifest"):
        (partial / name).write_bytes((base / name).read_bytes())
    (partial / "generation").write_text(base.name.split("-")[2])
    indices = [line.split()[0] for line in (base / "manifest").read_text().splitlines()[4:]]
    (partial / "have").write_text("".join(f"{index}\n" for index in indices[:3]))
    flip(partial / "image", int(indices[1]) * 4 * MiB + MiB)
    for path in (partial.parent.parent, partial.parent, partial, *partial.iterdir()):
        staging.cloud.give(path)
    found = summary(staging.command("stage", str(image), "--hosts", "h2", "--compress", "none"))
    assert found["complete"]
    # A peer that is slow, on a busy machine, is left for the store.
    came = {name: row["extents"] for name, row in found["hosts"]["h2"]["sources"].items()}
    assert came["h1"] and sum(came.values()) == len(indices) - 2, "the two that were good are not sent again"
    check(staging, image, "h1 h2")


def test_content_without_a_generation_is_read_once_and_staged(staging: Staging) -> None:
    image = staging.image("unknown")
    source = staging.lab.fe.path(staging.cloud.source(image))
    with source.open("r+b") as file:
        file.write(b"changed by a persistent session")
    found = summary(staging.command("stage", str(image), "--hosts", "h1,h2,h3"))
    assert found["complete"]
    check(staging, image, "h1 h2 h3")


def test_dead_host_is_said_and_the_others_have_it(staging: Staging) -> None:
    image = staging.image("dead")
    staging.lab.node("h2").cut()
    started = time.monotonic()
    found = summary(staging.command("stage", str(image), code=1))
    assert time.monotonic() - started < 90
    assert not found["complete"] and [name for name, row in found["hosts"].items() if not row["ok"]] == ["h2"]
    assert "h2" in found["hosts"]["h2"]["why"]
    staging.lab.node("h2").join()
    check(staging, image, "h1 h3 h4")


def test_damaged_store_stages_nothing_and_says_why(staging: Staging) -> None:
    image = staging.image("rotten-store")
    flip(staging.lab.fe.path(staging.cloud.source(image)), 5)
    found = summary(staging.command("stage", str(image), "--hosts", "h1,h2,h3", code=1))
    whys = [row["why"] for row in found["hosts"].values()]
    assert any("SS025" in why for why in whys), whys
    assert not any(staging.bases(host) for host in staging.names)


@pytest.fixture(scope="module")
def wished(staging: Staging) -> Dict[str, int]:
    """An image that could be staged, and one that cannot."""
    persistent = staging.cloud.data_image("bad-persistent", b"x", 1, persistent=True)
    return {"image": staging.image("bad-wishes", mib=1, data=0), "persistent": persistent}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "no image 'nothing'"),
        ([], "images are wanted"),
        (["1", "--due"], "images are wanted"),
        (["{image},nothing@h1"], "no image 'nothing'"),
        (["{image}@h1,x9"], "no such host in OpenNebula: x9"),
        (["{image}", "--hosts", "h1,x9"], "no such host in OpenNebula: x9"),
        (["{image}", "--cluster", "none"], "no cluster"),
        (["{image}", "--rate", "fast"], "not a rate"),
        (["{persistent}"], "it is persistent"),
    ],
)
def test_bad_wishes_get_one_line_and_exit_code_2(
    staging: Staging, wished: Dict[str, int], words: List[str], said: str
) -> None:
    argv = [word.format(**wished) for word in words]
    done = staging.lab.fe.run([COMMAND, "stage", *argv], check=False)
    assert done.returncode == 2 and done.stdout == b""
    text = done.stderr.decode()
    assert said in text and len(text.splitlines()) == 1, text


def test_images_that_are_due_are_staged_and_no_others(staging: Staging) -> None:
    due, other = staging.image("due", mib=8, data=4), staging.image("not-due", mib=8, data=4)
    staging.cloud.oned.images[due].template["SEMISHARED_STAGE"] = "on-upload"
    try:
        lines = staging.command("stage", "--due", "--hosts", "h1,h2")
        assert [image["id"] for line in lines if line["event"] == "summary" for image in line["images"]] == [
            due
        ]
        check(staging, due, "h1 h2")
        assert not staging.has("h1", other)
    finally:
        del staging.cloud.oned.images[due].template["SEMISHARED_STAGE"]


@pytest.mark.fault(60, "a dead host costs a run of `stage --due` its own bases, one wait and one line")
def test_dead_host_costs_a_run_of_due_images_that_host_alone(staging: Staging) -> None:
    due = [staging.image(f"due-{number}", mib=8, data=4, seed=number) for number in range(3)]
    for image in due:
        staging.cloud.oned.images[image].template["SEMISHARED_STAGE"] = "on-upload"
    words = [COMMAND, "stage", "--due", "--hosts", "h1,h2,h3"]
    try:
        staging.lab.node("h2").cut()
        done = staging.lab.fe.run([*words, "--json"], check=False, timeout=200)
        events = [json.loads(line) for line in done.stdout.decode().splitlines()]
        (line,) = done.stderr.decode().splitlines()
        assert done.returncode == 1 and "h2 is left out, and tried again by the next --due: " in line
        found = [event for event in events if event["event"] == "summary"]
        assert [[name for name, row in one["hosts"].items() if not row["ok"]] for one in found] == [
            ["h2"]
        ] * 3
        assert not any(one["complete"] for one in found)
        # Only the first session has waited for it.
        asked = [event for event in events[events.index(found[0]) :] if event.get("host") == "h2"]
        assert asked == []
        for image in due:
            check(staging, image, "h1 h3")
        staging.lab.node("h1").cut()
        staging.lab.node("h3").cut()
        done = staging.lab.fe.run(words, check=False, timeout=200)
        assert done.returncode == 1 and len(done.stderr.decode().splitlines()) == 3, done.stderr
        for name in ("h1", "h2", "h3"):
            staging.lab.node(name).join()
        found = [line for line in staging.command(*words[1:]) if line["event"] == "summary"]
        assert len(found) == 3 and all(one["complete"] for one in found)
        for image in due:
            check(staging, image, "h1 h2 h3")
    finally:
        for image in due:
            del staging.cloud.oned.images[image].template["SEMISHARED_STAGE"]


def test_stage_and_clones_at_once_share_one_transfer(staging: Staging) -> None:
    image = staging.image("shared", mib=128, data=64)
    stage = staging.lab.fe.popen([COMMAND, "stage", str(image), "--json", "--wait"], stdout=-1)
    time.sleep(0.5)
    vm = staging.deploy("shared", image, "h2")
    out, _ = stage.communicate(timeout=90)
    found = json.loads(out.decode().splitlines()[-1])
    assert stage.returncode == 0 and found["complete"]
    assert found["bytes"]["store"] <= 64 * MiB
    assert staging.cloud.oned.state(vm) == ("ACTIVE", 3)
    check(staging, image, "h1 h2 h3 h4")
