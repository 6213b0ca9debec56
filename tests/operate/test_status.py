# SPDX-License-Identifier: Apache-2.0
"""`semishared status` and `semishared plan` on VMs of every place: what they say is what is there, and plan
does nothing.
"""

from __future__ import annotations

import json
from typing import Any, Dict, Tuple

import pytest

from lab.cloud import DATASTORES, STORE, SYSTEM, Cloud

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
DATA = b"status" * 1024


def run(cloud: Cloud, *words: str, code: int = 0) -> Tuple[Dict[str, Any], str]:
    done = cloud.lab.fe.run([COMMAND, *words], check=False)
    assert done.returncode == code, done.stderr
    return (json.loads(done.stdout) if "--json" in words and done.stdout else {}), done.stderr.decode()


def status(cloud: Cloud, *words: str, code: int = 0) -> Dict[str, Any]:
    return run(cloud, "status", "--json", *words, code=code)[0]


@pytest.fixture(scope="module")
def standing(cloud: Cloud) -> int:
    """A VM on h1 with a disk of each place, off: its guest does not matter here."""
    images = [
        cloud.data_image("st-mine", DATA, persistent=True),
        cloud.data_image("st-cow", DATA),
        cloud.data_image("st-copy", DATA, SEMISHARED_LOCAL="copy"),
        cloud.data_image("st-beside", DATA, SEMISHARED_PLACE="shared"),
    ]
    disks = [{"IMAGE_ID": str(image)} for image in images]
    return cloud.deploy("st", [*disks, {"TYPE": "fs", "SIZE": "16", "FORMAT": "raw"}])


def test_every_place_and_why(cloud: Cloud, standing: int) -> None:
    vm = standing
    answer = status(cloud, "st")
    seen = {row["image"]: (row["place"], row["how"], row["machine"], row["why"]) for row in answer["disks"]}
    number = {image.name: image.id for image in cloud.oned.images.values()}
    assert seen == {
        "st-mine": ("shared", "in-place", "h1", "persistent: attached in place"),
        "st-cow": ("local", "overlay", "h1", "not persistent: the default"),
        "st-copy": (
            "local",
            "copy",
            "h1",
            f"not persistent, SEMISHARED_LOCAL = copy of image {number['st-copy']}",
        ),
        "st-beside": (
            "shared",
            "store-clone",
            "h1",
            f"SEMISHARED_PLACE = shared of image {number['st-beside']}",
        ),
        None: ("local", "volatile", "h1", "volatile: its VM's own"),
    }
    (base,) = answer["bases"]
    assert base["name"].startswith(f"{STORE}-{number['st-cow']}-") and base["leases"] == [f"{vm}-1"]
    assert [row["base"] for row in answer["disks"] if row["image"] == "st-cow"] == [base["name"]]


def test_by_host_and_image(cloud: Cloud, standing: int) -> None:
    vm = standing
    assert {row["vm"] for row in status(cloud, "host:h1")["disks"]} >= {vm}
    assert status(cloud, "h2")["disks"] == []
    assert [row["disk"] for row in status(cloud, "image:st-copy")["disks"]] == [2]
    assert [row["disk"] for row in status(cloud, f"vm:{vm}")["disks"]] == [0, 1, 2, 3, 4]
    assert len(status(cloud)["disks"]) >= 5


def test_a_lost_record_is_said(cloud: Cloud, standing: int) -> None:
    vm = standing
    record = cloud.lab.node("h1").path(f"{DATASTORES}/{SYSTEM}/{vm}/.semishared/disk.1.json")
    text = record.read_bytes()
    owner = record.stat()
    record.unlink()
    try:
        answer = status(cloud, "st", code=1)
    finally:
        record.write_bytes(text)
        cloud.give(record)
        record.chmod(owner.st_mode)
    assert [row["missing"] for row in answer["disks"] if row["disk"] == 1] == ["no record"]


def test_unknown_names_and_dead_hosts(cloud: Cloud, standing: int) -> None:
    assert "no VM, host or image 'nobody'" in run(cloud, "status", "nobody", code=2)[1]
    h2 = cloud.lab.node("h2")
    h2.cut()
    try:
        answer = status(cloud, code=2)
    finally:
        h2.join()
    assert [error["host"] for error in answer["errors"]] == ["h2"] and len(answer["disks"]) >= 5


def test_plan_says_the_steps_and_does_nothing(cloud: Cloud, standing: int) -> None:
    vm = standing
    image = next(image for image in cloud.oned.images.values() if image.name == "st-cow")
    place = f"{DATASTORES}/{SYSTEM}/{vm}"
    before = cloud.files(cloud.lab.node("h2"), DATASTORES)
    plan, _ = run(
        cloud, "plan", "--json", "clone", f"fe:{image.source}", f"h2:{place}/disk.1", str(vm), str(STORE)
    )
    # Its template names a machine type, which its guest has already.
    (part,) = plan["plan"]
    assert part["host"] == "h2" and [step["step"] for step in part["steps"]] == [
        "StageBase",
        "PrepareVm",
        "CreateOverlay",
    ]
    plan, _ = run(cloud, "plan", "--json", "delete", f"h1:{place}", str(vm), str(SYSTEM))
    assert [step["step"] for step in plan["plan"][0]["steps"]] == ["RemoveVm"]
    plan, _ = run(cloud, "plan", "--json", "mv", f"h1:{place}", f"h2:{place}", str(vm), str(SYSTEM))
    looks = [("h1", "MarkVm"), ("h2", "LookForVm")]
    assert [(part["host"], part["steps"][0]["step"]) for part in plan["plan"]] == [
        *looks,
        ("h2", "MakeRoom"),
        ("h1", "SendVm"),
        ("h2", "ReceiveVm"),
    ]
    assert ["answers" in part for part in plan["plan"]] == [True, True, False, False, False] and plan["open"]
    plan, _ = run(cloud, "plan", "--json", "snap_create_live", f"h1:{place}/disk.1", "0", str(vm), str(STORE))
    described, made = plan["plan"]
    assert described["answers"][0]["target"] and [step["step"] for step in made["steps"]] == [
        "AddLayer",
        "SwitchLayer",
    ]
    assert (
        run(cloud, "plan", "--json", "mv", f"h1:{place}/disk.1", f"h2:{place}/disk.1", str(vm), str(STORE))[
            0
        ]["plan"]
        == []
    )
    assert cloud.files(cloud.lab.node("h2"), DATASTORES) == before and status(cloud, "st")["disks"]


def test_plan_refuses_as_the_action_would(cloud: Cloud, standing: int) -> None:
    vm = standing
    place = f"h1:{DATASTORES}/{SYSTEM}/{vm}"
    mine = next(image for image in cloud.oned.images.values() if image.name == "st-mine")
    said = run(cloud, "plan", "clone", f"fe:{mine.source}", f"{place}/disk.0", str(vm), str(STORE), code=1)[1]
    assert said.startswith("SS001 image ") and said.endswith(" [clone]\n") and said.count("\n") == 1
    assert (
        "is no disk" in run(cloud, "plan", "snap_create", f"{place}/kernel", "0", str(vm), "100", code=1)[1]
    )
    assert "is no transfer action" in run(cloud, "plan", "explode", code=1)[1]


def test_the_end(cloud: Cloud, standing: int) -> None:
    vm = standing
    cloud.terminate(vm)
    assert status(cloud)["disks"] == [] or all(row["vm"] != vm for row in status(cloud)["disks"])
