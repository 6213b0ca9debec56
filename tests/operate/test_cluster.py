# SPDX-License-Identifier: Apache-2.0
"""`semishared cluster` on sets of VMs: who is meant, boot, status; what cannot be done is said VM by VM."""

from __future__ import annotations

import json
import random
import shutil
import threading
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from lab.cloud import STORE, SYSTEM, Cloud
from lab.oned.states import Lcm
from lab.oned.states import Vm as State

EXTENT = 4 << 20
COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
LABEL = 'it\'s "ours" $(touch /tmp/x)'


def run(cloud: Cloud, *words: str, code: int = 0) -> Tuple[Dict[str, Any], List[Dict[str, Any]], str]:
    """Return the summary, the events before it, and what was said on stderr."""
    done = cloud.lab.fe.run([COMMAND, "cluster", *words, "--json"], check=False, timeout=200)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    lines = [json.loads(line) for line in done.stdout.decode().splitlines()]
    return (lines[-1] if lines else {}), lines[:-1], done.stderr.decode()


def rows(found: Dict[str, Any]) -> Dict[int, Tuple[str, str]]:
    return {row["vm"]: (row["how"], row["why"]) for row in found["rows"]}


@pytest.fixture(scope="module")
def cluster(cloud: Cloud) -> Iterator[List[int]]:
    """Four VMs of one image on two hosts, with a label; a service of OneFlow and a VM group name them, and
    one that is no more.
    """
    image = cloud.data_image("cluster", b"cluster" * 4096)
    vms = []
    for number in range(4):
        vms.append(cloud.deploy(f"cluster-{number}", [{"IMAGE_ID": str(image)}], f"h{1 + number % 2}"))
        cloud.oned.vms[vms[-1]].user_template["LABELS"] = f"other,{LABEL}"
    rpc = cloud.oned.rpc
    assert rpc
    body = json.dumps({"roles": [{"nodes": [{"deploy_id": vm} for vm in (*vms[:3], 9999)]}, {"nodes": []}]})
    rpc.documents = [
        (
            100,
            f"<DOCUMENT><ID>1</ID><UID>0</UID><NAME>flow</NAME><TEMPLATE><BODY><![CDATA[{body}]]></BODY></TEMPLATE></DOCUMENT>",
        ),
        (
            100,
            "<DOCUMENT><ID>2</ID><NAME>odd</NAME><TYPE>100</TYPE><TEMPLATE><BODY>{</BODY></TEMPLATE></DOCUMENT>",
        ),
        (101, "<DOCUMENT><ID>3</ID><NAME>template</NAME><TYPE>101</TYPE><TEMPLATE/></DOCUMENT>"),
    ]
    rpc.vm_groups = [
        f"<VM_GROUP><ID>5</ID><NAME>group</NAME><ROLES><ROLE><VMS>{vms[0]},{vms[3]}</VMS></ROLE></ROLES></VM_GROUP>"
    ]
    yield vms
    for vm in vms:
        cloud.oned.vm_recover(vm, "delete")


def off(cloud: Cloud, vms: List[int]) -> None:
    for vm in vms:
        if cloud.oned.vms[vm].state == State.ACTIVE:
            cloud.oned.vm_poweroff(vm, hard=True)


def test_status_by_each_way_to_name_a_set(cloud: Cloud, cluster: List[int]) -> None:
    for words, meant in (
        (["--label", LABEL], cluster),
        (["--service", "flow"], cluster[:3]),
        (["--service", "1"], cluster[:3]),
        (["--vmgroup", "group"], [cluster[0], cluster[3]]),
        (["--vms", f"cluster-1,{cluster[2]}"], cluster[1:3]),
    ):
        found, events, _ = run(cloud, "status", *words)
        assert [row["vm"] for row in found["rows"]] == meant and found["failed"] == 0, words
        assert [event["vm"] for event in events] == meant
        assert all(
            disk["how"] == "overlay" and disk["base"] for row in found["rows"] for disk in row["disks"]
        )


def test_set_that_is_off_runs_after_boot_and_what_runs_is_left_alone(
    cloud: Cloud, cluster: List[int]
) -> None:
    off(cloud, cluster[:3])
    found, events, _ = run(cloud, "boot", "--label", LABEL)
    assert rows(found) == {**{vm: ("booted", "") for vm in cluster[:3]}, cluster[3]: ("running", "")}
    assert {event["vm"] for event in events if event["event"] == "vm"} == set(cluster)
    assert all(
        (cloud.oned.vms[vm].state, cloud.oned.vms[vm].lcm) == (State.ACTIVE, Lcm.RUNNING) for vm in cluster
    )
    asked = [parameters[1:] for method, parameters in cloud.oned.rpc.requests if method == "one.vm.action"]  # type: ignore[union-attr]
    assert sorted(asked) == sorted(("resume", vm) for vm in cluster[:3])


@contextmanager
def scheduling(cloud: Cloud, host: str) -> Iterator[None]:
    """Be the scheduler that sends each VM to one host: the simulated oned has none that runs by itself."""
    rpc = cloud.oned.rpc
    assert rpc
    resume = rpc.actions["resume"]

    def scheduled(number: int) -> None:
        threading.Thread(
            target=lambda: cloud.oned.vm_deploy(number, host, SYSTEM, by_scheduler=True), daemon=True
        ).start()

    rpc.actions["resume"] = scheduled
    try:
        yield
    finally:
        rpc.actions["resume"] = resume


@pytest.mark.fault(61, "cluster boot --hosts has VMs run on these hosts, and changes nothing in them")
def test_undeployed_vms_come_up_on_the_named_hosts_over_bases_that_came_first(
    cloud: Cloud, cluster: List[int]
) -> None:
    rpc, vm = cloud.oned.rpc, cluster[0]
    assert rpc
    cloud.oned.vm_undeploy(vm, hard=True)
    other = cloud.data_image("elsewhere", b"elsewhere" * 4096)
    moved = cloud.deploy("cluster-moved", [{"IMAGE_ID": str(other)}])
    cloud.oned.vm_undeploy(moved, hard=True)
    new = cloud.oned.vm_create(cloud.template("cluster-new", [{"IMAGE_ID": str(other)}]))
    before = [dict(cloud.oned.vms[number].user_template) for number in (vm, moved, new)]
    since = len(rpc.requests)
    found, events, _ = run(cloud, "boot", "--vms", f"{vm},{moved},{new}", "--hosts", "h2")
    assert rows(found) == {number: ("booted", "") for number in (vm, moved, new)}
    assert {row["host"] for row in found["rows"]} == {"h2"}
    assert [dict(cloud.oned.vms[number].user_template) for number in (vm, moved, new)] == before
    done = [(method, words[1:]) for method, words in rpc.requests[since:] if ".info" not in method]
    h2 = next(host.id for host in cloud.oned.hosts.values() if host.name == "h2")
    deployed = [("one.vm.deploy", (number, h2, True, SYSTEM)) for number in (vm, moved, new)]
    assert [request for request in done if request[0].startswith("one.vm.")] == deployed
    staged = [
        event for event in events if event["event"] == "host" and event["host"] == "h2" and event["done"]
    ]
    assert staged and events.index(staged[0]) < events.index(
        next(event for event in events if event["event"] == "vm")
    )
    root = cloud.lab.node("h2").path("/var/lib/one/datastores/.semishared/bases")
    assert [path.name for path in root.iterdir() if path.name.startswith(f"{STORE}-{other}-")]
    for number in (moved, new):
        cloud.terminate(number)
    cloud.oned.vm_undeploy(vm, hard=True)
    cloud.oned.vm_deploy(vm, "h1", SYSTEM)


def test_vm_with_requirements_of_its_own_is_left_to_the_scheduler(cloud: Cloud, cluster: List[int]) -> None:
    vm = cluster[0]
    wanted = cloud.oned.vms[vm].user_template
    wanted["SCHED_REQUIREMENTS"] = 'NAME = "h1"'
    cloud.oned.vm_undeploy(vm, hard=True)
    try:
        with scheduling(cloud, "h1"):
            found, events, _ = run(cloud, "boot", "--vms", str(vm), "--hosts", "h2", code=1)
    finally:
        del wanted["SCHED_REQUIREMENTS"]
    assert rows(found) == {vm: ("elsewhere", "it is on h1, none of --hosts: its SCHED_REQUIREMENTS")}
    (note,) = [event["text"] for event in events if event.get("host") == "scheduler"]
    assert note.startswith("1 VM waits for OpenNebula's scheduler") and "MAX_HOST = 1" in note


def test_vm_without_a_host_waits_for_the_scheduler_where_no_hosts_are_named(
    cloud: Cloud, cluster: List[int]
) -> None:
    cloud.oned.vm_undeploy(cluster[0], hard=True)
    with scheduling(cloud, "h1"):
        found, events, _ = run(cloud, "boot", "--vms", str(cluster[0]))
    assert rows(found) == {cluster[0]: ("booted", "")}
    assert [event["host"] for event in events if event["event"] == "note"] == ["scheduler"]


def test_set_lets_go_of_its_store_with_one_session_for_all_bases(cloud: Cloud, cluster: List[int]) -> None:
    """Two images that differ in one extent of three, each for its own host; the others have nothing to let go
    of.
    """
    common = random.Random(1).randbytes(2 * EXTENT)
    images = [
        cloud.data_image(
            f"remote-{seed}",
            common + random.Random(seed).randbytes(EXTENT),
            64,
            SEMISHARED_LOCAL="remote-first",
        )
        for seed in (2, 3)
    ]
    vms = [
        cloud.deploy(f"remote-{place}", [{"IMAGE_ID": str(image)}], f"h{place}")
        for place, image in enumerate(images, 1)
    ]
    words = ["--vms", ",".join(map(str, [*vms, cluster[0]]))]
    found, _, _ = run(cloud, "status", *words)
    assert [disk["how"] for row in found["rows"] for disk in row["disks"]] == [
        "remote-first",
        "remote-first",
        "overlay",
    ]
    found, events, _ = run(cloud, "detach", *words, "--rate", "200M")
    assert rows(found) == {
        **{vm: ("detached", "") for vm in vms},
        cluster[0]: ("skipped", "no disk of it reads from a store"),
    }
    assert [event["transport"] for event in events if event["event"] == "plan"] == ["unicast"], "one session"
    found, _, _ = run(cloud, "status", *words)
    assert [disk["how"] for row in found["rows"] for disk in row["disks"]] == ["overlay"] * 3
    off(cloud, vms[:1])
    found, _, _ = run(cloud, "detach", *words)
    assert {how for how, _ in rows(found).values()} == {"skipped"} and found["failed"] == 0, (
        "repeated, it finds nothing to do"
    )
    for vm in vms:
        cloud.oned.vm_recover(vm, "delete")


def test_set_is_committed_and_boots_again_over_what_it_has_in_common(
    cloud: Cloud, cluster: List[int]
) -> None:
    """Two persistent images on their hosts, written to by each VM; then bases of both for a second boot,
    elsewhere.
    """
    common = random.Random(7).randbytes(2 * EXTENT)
    images = [
        cloud.data_image(f"diff-{number}", common, 64, persistent=True, SEMISHARED_PLACE="local")
        for number in (1, 2)
    ]
    vms = [
        cloud.deploy(f"diff-{place}", [{"IMAGE_ID": str(image)}], f"h{place}")
        for place, image in enumerate(images, 1)
    ]
    off(cloud, vms)
    for place, vm in enumerate(vms, 1):
        argv = [
            "qemu-io",
            "-f",
            "qcow2",
            "-c",
            f"write -P {place} {place * 12}M 64k",
            f"{cloud.vm_dir(vm)}/disk.0",
        ]
        cloud.lab.node(f"h{place}").run(argv)
    words = ["--vms", ",".join(map(str, [*vms, cluster[0]]))]
    found, _, _ = run(cloud, "commit", *words)
    assert {vm: how for vm, (how, _) in rows(found).items()} == {
        **{vm: "committed" for vm in vms},
        cluster[0]: "skipped",
    }
    for place, image in enumerate(images, 1):
        with cloud.lab.fe.path(cloud.source(image)).open("rb") as file:
            file.seek(place * 12 << 20)
            assert file.read(65536) == bytes([place]) * 65536
    found, _, _ = run(cloud, "commit", *words)
    assert {row["said"] for row in found["rows"] if row["how"] == "committed"} == {"nothing new to commit"}
    for path in [
        path
        for node in cloud.lab.hosts
        for path in node.path("/var/lib/one/datastores/.semishared/bases").iterdir()
    ]:
        if path.name.startswith(tuple(f"{STORE}-{image}-" for image in images)):
            shutil.rmtree(path)
    argv = [COMMAND, "stage", f"{images[0]}@h2", f"{images[1]}@h1", "--json"]
    staged = json.loads(cloud.lab.fe.run(argv, timeout=200).stdout.decode().splitlines()[-1])
    assert staged["complete"] and (staged["common"], staged["unique"]) == (2 * EXTENT, 2 * EXTENT)
    assert staged["bytes"]["store"] == 4 * EXTENT
    for vm in vms:
        cloud.oned.vm_recover(vm, "delete")


def test_vm_that_does_not_come_up_is_said_and_the_others_run(cloud: Cloud, cluster: List[int]) -> None:
    off(cloud, cluster[:2])
    node, disk = cloud.lab.node("h1"), f"{cloud.vm_dir(cluster[0])}/disk.0.snap/0"
    node.run(["mv", disk, f"{disk}.away"])
    try:
        found, _, _ = run(cloud, "boot", "--vms", ",".join(map(str, cluster[:2])), code=1)
    finally:
        node.run(["mv", f"{disk}.away", disk])
    how, why = rows(found)[cluster[0]]
    assert how == "failed" and why and rows(found)[cluster[1]] == ("booted", "")
    if cloud.oned.vms[cluster[0]].state == State.ACTIVE:
        cloud.oned.vm_recover(cluster[0], "retry")
    else:
        run(cloud, "boot", "--vms", str(cluster[0]))


def test_host_that_is_gone_costs_its_own_vms_alone(cloud: Cloud, cluster: List[int]) -> None:
    node = cloud.lab.node("h2")
    node.cut()
    try:
        found, _, _ = run(cloud, "status", "--label", LABEL, code=1)
    finally:
        node.join()
    assert [rows(found)[vm][0] for vm in cluster] == ["seen", "failed", "seen", "failed"]


def test_vms_of_other_drivers_are_left_alone_and_said(cloud: Cloud, cluster: List[int]) -> None:
    stranger = cloud.oned.vm_create({"NAME": "stranger", "CPU": "1", "MEMORY": "32", "LABELS": LABEL})
    cloud.oned.vms[stranger].user_template["LABELS"] = LABEL
    try:
        found, _, _ = run(cloud, "boot", "--label", LABEL)
        assert rows(found)[stranger] == ("skipped", "no disk of it is of driver semishared")
        found, _, _ = run(cloud, "boot", "--vms", str(stranger), code=1)
        assert rows(found)[stranger][0] == "skipped"
    finally:
        cloud.oned.vm_recover(stranger, "delete")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["boot", "--vms", "99999"], "no VM '99999'"),
        (["boot", "--vms", ""], "no VM ''"),
        (["boot", "--label", "x' --"], "no VM has the label"),
        (["status", "--service", "nothing"], "no service of OneFlow 'nothing'"),
        (["status", "--service", "odd"], "is no service"),
        (["status", "--service", "template"], "no service of OneFlow 'template'"),
        (["status", "--vmgroup", "7"], "no VM group '7'"),
        (["boot", "--vms", "cluster-0", "--hosts", "h9"], "no such host"),
        (["boot", "--vms", "cluster-0", "--rate", "fast"], "not a rate"),
        (["commit", "--vms", "cluster-0", "--rate", "fast"], "not a rate"),
        (["status", "--vms", "cluster-0", "--rate", "4M"], "no --rate"),
    ],
)
def test_what_is_not_there_is_one_line_and_nothing_is_begun(
    cloud: Cloud, cluster: List[int], words: List[str], said: str
) -> None:
    _, events, text = run(cloud, *words, code=2)
    assert said in text and len(text.splitlines()) == 1 and not events, text
