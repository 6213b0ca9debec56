# SPDX-License-Identifier: Apache-2.0
"""`semishared attention` in a clean cloud, and with planted symptoms: each is found with the command that
mends it; what was done then is in the trail.
"""

from __future__ import annotations

import json
from typing import Any, Dict, Iterator, List

import pytest

from lab.cloud import DATASTORES, SYSTEM, Cloud
from operate.test_status import COMMAND, DATA, run

EPILOG_FAILURE = 40
LOG = "/var/log/one/semishared.log"
Item = Dict[str, Any]


def attention(cloud: Cloud, code: int = 1) -> List[Item]:
    answer, _ = run(cloud, "attention", "--json", code=code)
    items: List[Item] = answer["items"]
    assert answer["errors"] == [] or code == 2
    return items


def trail(cloud: Cloud) -> List[Item]:
    log = cloud.lab.fe.path(LOG)
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture(scope="module")
def vms(cloud: Cloud) -> Iterator[List[int]]:
    """Two VMs on h1 that are off, each with an overlay and a local disk of a persistent image, written to."""
    cow = cloud.data_image("at-cow", DATA)
    found = []
    for number in (1, 2):
        mine = cloud.data_image(f"at-mine{number}", DATA, persistent=True, SEMISHARED_PLACE="local")
        vm = cloud.deploy(f"at{number}", [{"IMAGE_ID": str(cow)}, {"IMAGE_ID": str(mine)}])
        cloud.oned.vm_poweroff(vm, hard=True)
        layer = f"{DATASTORES}/{SYSTEM}/{vm}/disk.1"
        cloud.lab.node("h1").run(["qemu-io", "-f", "qcow2", "-c", "write -P 0x55 0 64k", layer])
        found.append(vm)
    yield found
    cloud.delete_all()


@pytest.mark.fault(77, "nothing waits in a clean cloud; what is planted is found, with what mends it")
def test_what_is_planted_is_found_and_what_is_mended_is_not(cloud: Cloud, vms: List[int]) -> None:
    kept, vm = vms
    assert attention(cloud, code=0) == [], "what was written an hour ago is where it belongs"
    # A VM is deleted before its disk was committed; another one cannot end; a record is damaged.
    cloud.oned.vm_recover(kept, "delete")
    held, before = cloud.oned.vm(vm), (cloud.oned.vm(vm).state, cloud.oned.vm(vm).lcm)
    held.state, held.lcm = 3, EPILOG_FAILURE
    held.user_template["ERROR"] = "Error executing image transfer script: SS024 image 7 cannot be reached"
    record = cloud.lab.node("h1").path(f"{DATASTORES}/{SYSTEM}/{vm}/.semishared/disk.0.json")
    text = record.read_bytes()
    record.write_bytes(text[: len(text) // 2])
    found = {item["kind"]: item for item in attention(cloud)}
    assert sorted(found) == ["disk-kept", "record-unreadable", "vm-failed"]
    assert found["vm-failed"]["command"] == f"onevm recover --retry {vm}"
    assert found["vm-failed"]["severity"] == "broken" and "SS024 image 7" in found["vm-failed"]["what"]
    assert found["record-unreadable"]["command"].startswith(f"semishared status {vm}")
    assert {item["machine"] for item in found.values()} == {"h1"}
    said = cloud.lab.fe.run([COMMAND, "attention"], check=False).stdout.decode()
    assert f"-> onevm recover --retry {vm}\n" in said and "3 things wait for an operator" in said
    record.write_bytes(text)
    held.state, held.lcm = before
    del held.user_template["ERROR"]
    # The command that it names brings the disk to its image.
    words = found["disk-kept"]["command"].partition(";")[0].split()
    assert words == ["semishared", "commit", str(kept), "1"]
    cloud.lab.fe.run([COMMAND, *words[1:]])
    assert attention(cloud, code=0) == []


@pytest.mark.fault(78, "a commit and what gc removes are in the trail of a front-end")
def test_what_was_done_is_in_the_trail(cloud: Cloud, vms: List[int]) -> None:
    ended, vm = vms
    begun = len(trail(cloud))
    cloud.lab.fe.run(["env", "SUDO_USER=alice", COMMAND, "commit", str(vm)])
    disk, verb = trail(cloud)[begun:]
    assert (disk["did"], disk["what"].partition(":")[0]) == ("commit disk", f"VM {vm} disk 1 on h1")
    assert (verb["did"], verb["what"], verb["who"], verb["result"]) == ("commit", str(vm), "alice@fe", "ok")
    left = cloud.lab.node("h2").path(f"{DATASTORES}/{SYSTEM}/{ended}")
    left.mkdir(parents=True)
    cloud.give(left)
    cloud.lab.fe.run([COMMAND, "gc", "--now"])
    gone = [row for row in trail(cloud) if row["did"] == "gc removal"]
    assert [row["result"] for row in gone if row["what"].endswith(f"/{ended} on h2")] == ["ok"], gone
    log = cloud.lab.fe.path(LOG)
    assert "one_auth" not in log.read_text() and log.stat().st_mode & 0o777 == 0o640


@pytest.mark.fault(77, "a host that does not answer is no reason to say that nothing waits")
def test_a_host_that_is_dead_is_said(cloud: Cloud) -> None:
    h2 = cloud.lab.node("h2")
    h2.cut()
    try:
        answer, _ = run(cloud, "attention", "--json", code=2)
    finally:
        h2.join()
    assert [error["host"] for error in answer["errors"]] == ["h2"]
