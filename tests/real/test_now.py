# SPDX-License-Identifier: Apache-2.0
"""What a real oned has of a first deploy while its bytes are on their way: NOW, jobs, oned's log."""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, Iterator, List
from xml.etree import ElementTree

import pytest

from lab.cloud import SYSTEM
from lab.guest import METAL
from lab.oned import Lcm
from real.conftest import SEMISHARED, RealCloud
from real.front_end import version

MIB = 24
RATE = 512 << 10
"""Bytes per second: the base comes in 48 s. NOW is written anew after 30."""
SETTINGS = "/var/lib/one/remotes/etc/semishared.conf"
LINE = re.compile(r"copying disk 0: (\d+) %, [\d.]+ [KM]iB/s( from the store)?")


@pytest.fixture
def slow_staging(cloud: RealCloud) -> Iterator[None]:
    """Let bases come at RATE, as an administrator does who writes it into semishared.conf."""
    path = cloud.lab.fe.path(SETTINGS)
    before = path.read_text()
    changed, times = re.subn(r"(?s)(\n\[staging\]\n.*?\nrate = )none\n", rf"\g<1>{RATE >> 10}K\n", before)
    assert times == 1
    path.write_text(changed)
    yield
    path.write_text(before)


def vector(cloud: RealCloud, vm: int) -> Dict[str, str]:
    """Return the VM's vector as `onevm show -x` prints it."""
    shown = ElementTree.fromstring(cloud.one.cli("onevm", "show", "-x", str(vm)))
    return {row.tag: row.text or "" for row in shown.findall("USER_TEMPLATE/SEMISHARED/*")}


def jobs(cloud: RealCloud) -> List[Dict[str, Any]]:
    """Return what `semishared jobs --json` lists."""
    said = json.loads(cloud.lab.fe.run([SEMISHARED, "jobs", "--json"], timeout=120).stdout)
    assert said["errors"] == []
    found: List[Dict[str, Any]] = said["jobs"]
    return found


@pytest.mark.fault(92, "a real oned shows what a deploy copies, how far it is, and nothing of it afterwards")
@pytest.mark.usefixtures("slow_staging")
def test_a_first_deploy_is_seen_while_it_copies_and_oned_s_log_says_what_came(cloud: RealCloud) -> None:
    data = random.Random(92).randbytes(MIB << 20)
    image = cloud.data_image("slow", data, MIB)
    system = {"ARCH": "x86_64", "MACHINE": cloud.lab.machine, **METAL.os}
    vm = cloud.oned.vm_create(cloud.template("slow", [{"IMAGE_ID": str(image)}], OS=system))
    lines: List[str] = []
    states, listed = set(), []
    work = ThreadPoolExecutor(1).submit(cloud.oned.vm_deploy, vm, "h1", SYSTEM)
    while not work.done():
        said = vector(cloud, vm).get("NOW", "")
        if said and said not in lines:
            lines.append(said)
            states.add(cloud.oned.state(vm))
            listed += [job for job in jobs(cloud) if job["vm"] == vm]
        time.sleep(0.5)
    work.result()
    found = [LINE.fullmatch(line) for line in lines]
    shares = [int(one[1]) for one in found if one]
    assert len(shares) == len(lines) >= 2 and shares == sorted(set(shares)), lines
    assert lines[-1].endswith(" from the store"), lines
    assert states == {("ACTIVE", Lcm.PROLOG)}, "oned shows it before the driver has ended"
    assert {(job["host"], job["disk"], job["asked_by"]) for job in listed} == {("h1", 0, "oned")}, listed
    far = [job["done"] for job in listed]
    assert far == sorted(set(far)) and far[0] > 0 and far[-1] < MIB << 20, listed
    assert "NOW" not in vector(cloud, vm) and not [job for job in jobs(cloud) if job["vm"] == vm]
    # What a transfer driver that succeeds has said: from 7.0 on it is there, before it is lost.
    log = cloud.one.log("oned.log")
    came = re.search(rf"clone: VM {vm}: h1: (\S+) MiB read from the store in (\S+) s \((\S+) KiB/s\)", log)
    if version() >= (7, 0):
        assert came and (float(came[1]), round(float(came[3]), -2)) == (MIB, 500), came
    guest = cloud.guest(vm)
    assert guest.sum("vda") == hashlib.sha256(data).hexdigest()
    cloud.terminate(vm)
    assert cloud.leftovers() == []
