# SPDX-License-Identifier: Apache-2.0
"""`semishared doctor` where a store is on Ceph: keys, secrets and pools as each machine has them."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List

import pytest

from configurations import oned_conf, vmm_execrc
from lab import Node
from lab.ceph import BRIDGE, READER, SECRET
from lab.cloud import RBD_STORE, Cloud
from lab.layout import FRONT_END_KEY
from lab.oned.template import parse
from semishared.front.fence_facts import TYPE, words
from semishared.plan.care.fence import FENCED, Mark
from semishared.tools import key

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"


@pytest.fixture(scope="module", autouse=True)
def installed(cloud: Cloud) -> Iterator[None]:
    etc = cloud.lab.fe.path("/etc/one")
    (etc / "vmm_exec").mkdir(parents=True)
    (etc / "oned.conf").write_text(oned_conf())
    (etc / "vmm_exec/vmm_execrc").write_text(vmm_execrc())
    cloud.lab.fe.run(["/opt/semishared/install.sh"], user="root")
    cloud.lab.sync()
    yield
    cloud.lab.fe.run(["rm", "-r", "/etc/one"], user="root")


def doctor(cloud: Cloud) -> List[Dict[str, Any]]:
    done = cloud.lab.fe.run([COMMAND, "doctor", "--json"], check=False, timeout=60)
    return cloud.lab.unexplained(json.loads(done.stdout)["findings"])


@contextmanager
def away(node: Node, path: str) -> Iterator[None]:
    node.run(["mv", path, f"{path}.away"], user="root")
    try:
        yield
    finally:
        node.run(["mv", f"{path}.away", path], user="root")


def test_sound(cloud: Cloud) -> None:
    assert doctor(cloud) == []


def test_missing_keys(cloud: Cloud) -> None:
    with away(cloud.lab.node("h2"), f"/etc/ceph/ceph.client.{READER}.keyring"):
        (finding,) = doctor(cloud)
    assert (
        finding["machine"] == "h2" and "cannot be listed" in finding["what"] and "ceph.md" in finding["mend"]
    )
    with away(cloud.lab.fe, f"/etc/ceph/ceph.client.{BRIDGE}.keyring"):
        (finding,) = doctor(cloud)
    assert finding["machine"] == "fe" and finding["severity"] == "broken"


def test_unknown_secret(cloud: Cloud) -> None:
    store = next(ds for ds in cloud.oned.datastores.values() if ds.template.get("DISK_TYPE") == "RBD")
    other = SECRET[:-1] + ("0" if SECRET[-1] != "0" else "1")
    store.template["CEPH_SECRET"] = other
    try:
        findings = doctor(cloud)
    finally:
        store.template["CEPH_SECRET"] = SECRET
    assert [(item["machine"], other in item["what"]) for item in findings] == [("h1", True), ("h2", True)]


def test_admin_is_refused_by_name(cloud: Cloud) -> None:
    store = next(ds for ds in cloud.oned.datastores.values() if ds.template.get("DISK_TYPE") == "RBD")
    before = store.template["CEPH_USER"]
    store.template["CEPH_USER"] = "admin"
    try:
        (finding,) = doctor(cloud)
    finally:
        store.template["CEPH_USER"] = before
    assert "not admin" in finding["what"] and "onedatastore update" in finding["mend"]


def test_no_key_to_shut_hosts_out_and_a_fenced_host_that_runs_on(cloud: Cloud) -> None:
    h1 = cloud.oned.host("h1")
    boot = cloud.lab.node("h1").run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout.decode().strip()
    store = cloud.oned.datastores[RBD_STORE].template
    store["SEMISHARED_CEPH_FENCE_USER"] = "nobody"
    mark = Mark(FENCED, 1, boot, 1)
    assert cloud.oned.rpc
    cloud.oned.rpc.notes[0] = (
        TYPE,
        parse(f'NAME="h1" {mark.template(h1.id, key.code(FRONT_END_KEY, words(mark, h1.id)))}'),
    )
    try:
        runs, cannot = sorted(doctor(cloud), key=lambda finding: str(finding["machine"]), reverse=True)
    finally:
        del store["SEMISHARED_CEPH_FENCE_USER"]
        cloud.oned.forget_fences()
    assert (runs["machine"], runs["severity"]) == (
        "h1",
        "broken",
    ) and "runs on with the guests of then" in runs["what"]
    assert "a dead host cannot be shut out" in cannot["what"] and "client.nobody" in cannot["what"]
    assert f"semishared caps --role fence {RBD_STORE}" in cannot["mend"]
