# SPDX-License-Identifier: Apache-2.0
"""Planners by cases: plan/cases/<action>/<situation>.json says what was asked and which steps, or which
error, follow.

    argv        what oned calls the action with
    disk        changes to the disk of the recorded VM (fixtures/vm.xml) that argv names; null removes an
    element
    vm          changes to the recorded VM; "disks": its disks instead of the recorded ones; "disk": changes
    to them by their numbers
    image       changes to the recorded image 1 (not persistent); TEMPLATE is an object of attributes
    datastore   changes to the recorded datastore 100
    here        hosts that are this machine (mv, cpds)
    why_not_fenced  why the source host may still write (mv of a VM that oned has lost sight of)
    clients     shares whose client the guest is, by disk (context)
    is_here     the front-end has the VM, and is not its host (delete, mvds)
    live        the VM runs (prebackup, postbackup)
    base_path   BACKUP_BASE_PATH of datastore.conf
    urls        where a backup has each disk (restore), "tpm": the state of the VM's TPM
    stdin       what a hypervisor action finds there
    message     the driver message that attach_disk is given among its arguments
    described   what the host says of the VM's disks (cli_detach: `semishared detach`, on one host), "disks":
    the only ones that are
                meant, "staged": by the disk, generation of its base and why that is not there; "rows": what
                becomes of each (cli_commit: `semishared commit` of one disk; argv is that of resize, stdout
                the bytes that were committed)
    exchange    what is asked and answered (exchanges.py)
    from_bridges  the original of a clone is in a datastore with a BRIDGE_LIST, as 7.4 says
    stdout      what a datastore action answers; its cases are in datastore_ACTION, those of a hypervisor
    action in vmm_ACTION
    error       {"id": ..., "words": [...]} how it ends, if it fails

REGENERATE=1 rewrites what is asked, keeping what is answered; read the difference before it is committed.
"""

from __future__ import annotations

import base64
import json
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional
from xml.etree import ElementTree

import pytest
from exchanges import played, told

from semishared.errors import SemisharedError
from semishared.front import transfer
from semishared.model.disk.acquired import Given
from semishared.model.exchange import File, Part, Plan
from semishared.model.steps import DescribeVm, ImageRef, from_data, is_look
from semishared.opennebula import args
from semishared.opennebula.xml import Datastore, Disk, Image, View, Vm
from semishared.plan.disk import backup, commits, detach, disks, removals, snapshots
from semishared.plan.image import placement
from semishared.plan.share.client_keys import Clients
from semishared.plan.store import datastore as datastores
from semishared.plan.vm import hypervisor, migration, moves

UNIT = Path(__file__).resolve().parents[1]
CASES = sorted((UNIT / "plan" / "cases").glob("*/*.json"))
OVERLAY_OPTIONS = placement.BY_SIZE
Case = dict[str, Any]


def changed(element: ElementTree.Element, changes: dict[str, Any]) -> ElementTree.Element:
    for name, value in changes.items():
        child = element.find(name)
        if child is None:
            child = ElementTree.SubElement(element, name)
        if value is None:
            element.remove(child)
        elif isinstance(value, dict):
            changed(child, value)
        else:
            child.text = str(value)
    return element


def recorded(name: str) -> ElementTree.Element:
    return ElementTree.parse(UNIT / "fixtures" / f"{name}.xml").getroot()


def vm(case: Case) -> Vm:
    element = recorded("vm")
    changes = dict(case.get("vm", {}))
    if "disks" in changes:
        template = element.find("TEMPLATE")
        assert template is not None
        for disk in template.findall("DISK"):
            template.remove(disk)
        for disk in changes.pop("disks"):
            changed(ElementTree.SubElement(template, "DISK"), disk)
    of_disks = changes.pop("disk", {})
    found = Vm(changed(element, changes))
    for number, values in of_disks.items():
        changed(found.disk(int(number)).element, values)
    return found


FILE_SYSTEMS = {"ext4": ("-m", "0"), "xfs": ()}
"""By datastore.conf: SUPPORTED_FS, and options of one."""


def disk(case: Case, number: Optional[int]) -> Disk:
    return Disk(changed(vm(case).disk(number or 0).element, case.get("disk", {})))


def image(case: Case) -> Image:
    return Image(changed(recorded("image-1"), case.get("image", {})))


def datastore(case: Case) -> Datastore:
    return Datastore(changed(recorded("datastore-100"), case.get("datastore", {})))


def clone(case: Case) -> Plan:
    request = args.FromImage.parse(case["argv"])
    if request.target.disk is None:
        return disks.copy_kernel(request, datastore(case))
    return disks.clone(
        request, disk(case, request.target.disk), image(case), datastore(case), OVERLAY_OPTIONS, started(case)
    )


def started(case: Case) -> Optional[Vm]:
    """Return the VM whose start is looked at, in the cases that are of that."""
    return vm(case) if "vm" in case else None


def ln(case: Case) -> Plan:
    request = args.FromImage.parse(case["argv"])
    return disks.ln(
        request,
        disk(case, request.target.disk),
        image(case),
        datastore(case),
        OVERLAY_OPTIONS,
        vm=started(case),
    )


def cluster(case: Case) -> View:
    element = ElementTree.fromstring("<CLUSTER><ID>0</ID><NAME>default</NAME><TEMPLATE /></CLUSTER>")
    return View(changed(element, case.get("cluster", {})))


def mkimage(case: Case) -> Plan:
    request = args.NewDisk.parse(case["argv"])
    return disks.mkimage(request, disk(case, request.target.disk), FILE_SYSTEMS)


def mkswap(case: Case) -> Plan:
    return disks.mkswap(args.NewDisk.parse_swap(case["argv"]))


def context(case: Case) -> Plan:
    roots = tuple(tuple(root) for root in case.get("roots", ()))
    clients = Clients(tuple(case["clients"]), b"", roots) if "clients" in case else None
    return disks.context(
        args.Context.parse(case["argv"]), File("/tmp/context.iso", "5e" * 32), 358400, clients
    )


def mvds(case: Case) -> Plan:
    return removals.mvds(args.ToImage.parse(case["argv"]), case.get("is_here", False))


def cpds(case: Case) -> Plan:
    request = args.ToImage.parse_copy(case["argv"])
    is_bridge = case.get("is_bridge", False)
    return backup.cpds(
        request, vm(case), datastore(case), request.disk.host, "AGENT-OR-SUSPEND", lambda *_: is_bridge
    )


def delete(case: Case) -> Plan:
    return removals.delete(args.Delete.parse(case["argv"]), case.get("is_here", False))


def _change(what: str, case: Case, live: bool = False) -> Plan:
    return snapshots.change(
        what, args.SnapshotPlace.parse(case["argv"]), vm(case), live=live, freeze="AGENT-OR-SUSPEND"
    )


def snap_create(case: Case) -> Plan:
    return _change("create", case)


def snap_create_live(case: Case) -> Plan:
    return _change("create", case, live=True)


def snap_delete(case: Case) -> Plan:
    return _change("delete", case)


def snap_revert(case: Case) -> Plan:
    return _change("revert", case)


def resize(case: Case) -> Plan:
    return snapshots.resize(args.Resize.parse(case["argv"]), vm(case))


def mv(case: Case) -> Plan:
    request, here = args.Move.parse(case["argv"]), case.get("here", ["fe"])
    is_here = request.source.host in here, request.target.host in here
    told = moves.Told(
        *is_here, case.get("front_end_runs_vms", False), case.get("why_not_fenced", ""), OVERLAY_OPTIONS
    )
    return moves.mv(request, vm(case), told)


def premigrate(case: Case) -> Plan:
    words = args.Migrate.parse(case["argv"])
    return migration.premigrate(words, vm(case), "70" * 8, given_by(case), case.get("address", ""))


def given_by(case: Case) -> dict[int, Given]:
    """Return what oned has given the VM: what the case has the host say, which is so (test_lying_answers.py:
    what if it is not).
    """
    answers = [
        answer
        for entry in case.get("exchange", [])
        for answer in entry.get("answered") or []
        if isinstance(answer, dict)
    ]
    records = [one for answer in answers for one in answer.get("records", [])]
    own = ("in-place", "diff")
    return {
        one["disk"]: Given(
            ImageRef.from_data({**one["image"], "generation": ""}),
            one["how"] not in own,
            one.get("readonly", False),
        )
        for one in records
        if one.get("image")
    }


def postmigrate(case: Case) -> Plan:
    return migration.postmigrate(args.Migrate.parse(case["argv"]), vm(case))


def failmigrate(case: Case) -> Plan:
    return migration.failmigrate(args.Migrate.parse(case["argv"]), vm(case))


def restore(case: Case) -> Plan:
    urls = {int(disk): url for disk, url in case["urls"].items()}
    return backup.restore(args.Restore.parse(case["argv"]), vm(case), urls, case.get("tpm", ""))


def prebackup(case: Case) -> Plan:
    request = args.Backup.parse(case["argv"])
    return backup.prebackup(
        request,
        vm(case),
        "PFZNPjwvVk0+",
        case.get("base_path", ""),
        live=case.get("live", False),
        are_one=str.__eq__,
    )


def postbackup(case: Case) -> Plan:
    request = args.Backup.parse(case["argv"])
    return backup.postbackup(request, case.get("base_path", ""), live=case.get("live", False))


def of_detach(case: Case) -> Part[Any]:
    answer = told(DescribeVm(2, ""), case["described"])
    found = detach.found(detach.wanted(vm(case), "/var/lib/one/datastores", case.get("disks")), answer)
    bases = {
        (record.of_image, "h1"): detach.Staged(*case["staged"][str(record.disk)]) for record in found.remote
    }
    return (yield from detach.on_host([found], bases, 0))


def of_commit(case: Case) -> Part[str]:
    domain = "" if case.get("is_here") else "one-2"
    return str(
        (
            yield from commits.commit(
                args.Resize.parse(case["argv"]).disk, vm(case), domain, "AGENT-OR-SUSPEND"
            )
        )
    )


def of_datastore(name: str, case: Case) -> Part[str]:
    asked = datastores.Asked(image(case), datastore(case), 16 << 40, FILE_SYSTEMS, "70" * 16, "fe")
    return datastores.planned(name, asked._replace(from_bridges=case.get("from_bridges", False)))


def of_hypervisor(name: str, case: Case) -> Plan:
    argv = list(case["argv"])
    if "message" in case:
        argv[hypervisor.MESSAGE] = base64.b64encode(case["message"].encode()).decode()
    return hypervisor.planned(hypervisor.Asked(name, tuple(argv), case.get("stdin", "").encode()))


PLANNERS: dict[str, Callable[[Case], Part[Any]]] = {
    planner.__name__: planner
    for planner in (
        clone,
        ln,
        mkimage,
        mkswap,
        context,
        mvds,
        cpds,
        delete,
        snap_create,
        snap_create_live,
        snap_delete,
        snap_revert,
        resize,
        mv,
        premigrate,
        postmigrate,
        failmigrate,
        prebackup,
        postbackup,
        restore,
    )
}
PLANNERS.update(cli_detach=of_detach, cli_commit=of_commit)
PLANNERS.update({f"datastore_{name}": partial(of_datastore, name) for name in datastores.ACTIONS})
PLANNERS.update({f"vmm_{name}": partial(of_hypervisor, name) for name in hypervisor.PLANNERS})


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", CASES, ids=name_of)
def test_plan_is_the_one_of_the_case(path: Path) -> None:
    case = json.loads(path.read_text())
    planner = PLANNERS[path.parent.name]
    found: list[Any] = []
    said = None
    with pytest.raises(SemisharedError) if "error" in case else nullcontext() as caught:
        said = played(planner(case), case.get("exchange", []), partial(changed_record, case), found)
    if caught:
        assert caught.value.id == case["error"]["id"]
        for word in case["error"]["words"]:
            assert word in caught.value.detail
    if os.environ.get("REGENERATE"):  # pragma: no cover - by hand
        results = {"rows" if isinstance(said, list) else "stdout": said} if said else {}
        pytest.skip(regenerate(path, {**case, **({"exchange": found} if found else {}), **results}))
    assert said in (None, "", case.get("stdout"), case.get("rows"))
    assert found == case.get("exchange", [])


def _looks(entry: dict[str, Any]) -> bool:
    """Tell whether a message changes nothing: a directory that is not there gets no mark, nor one on a host
    that is lost.
    """
    steps = entry["asked"]["steps"]
    marks = [step["step"] for step in steps] == ["MarkVm"]
    is_marked = marks and "failed" not in entry and entry["answered"][0]["present"]
    return all(is_look(from_data(step)) for step in steps) or (marks and not is_marked)


MOVES = [path for path in CASES if path.parent.name in ("mv", "premigrate", "postmigrate", "failmigrate")]


@pytest.mark.parametrize("path", MOVES, ids=name_of)
def test_no_machine_is_changed_before_both_are_known_to_be_of_this_version(path: Path) -> None:
    entries = [
        entry
        for entry in json.loads(path.read_text()).get("exchange", [])
        if "steps" in entry.get("asked", {})
    ]
    asked = [entry["asked"] for entry in entries]
    first = next((at for at, entry in enumerate(entries) if not _looks(entry)), len(entries))
    heard = {one["machine"] for one in asked[: first + 1]}
    assert {machine for one in asked for machine in (one["machine"], one.get("to", one)["machine"])} <= heard


def changed_record(case: Case, name: str, changes: dict[str, Any]) -> Any:
    """Return what oned says of the VM, image or datastore `name` when a plan asks, `changes` over those of
    the case.

    Where a case does not say it, an image is what the disk that names it says.
    """
    if name == "image":
        of = next((disk for disk in vm(case).disks if disk.image_id == changes.get("ID", 1)), None)
        changes = {**({"SOURCE": of.source, "DATASTORE_ID": of.store_id} if of else {}), **changes}
    return {"vm": vm, "image": image, "datastore": datastore, "cluster": cluster}[name](
        {**case, name: {**case.get(name, {}), **changes}}
    )


def regenerate(path: Path, case: Case) -> str:
    from conftest import WATCH  # type: ignore[attr-defined] # that of tests/unit

    WATCH.active = False
    path.write_text(json.dumps(case, indent=1) + "\n")
    return "rewritten"


def test_every_planner_has_cases_and_refusals() -> None:
    by_action: dict[str, list[Case]] = {}
    for path in CASES:
        by_action.setdefault(path.parent.name, []).append(json.loads(path.read_text()))
    assert set(by_action) == set(PLANNERS)
    of_running_guests = {"prebackup_live", "postbackup_live"}  # cases of the others, with "live"
    assert set(transfer.PLANNED) - of_running_guests == {
        name for name in PLANNERS if not name.startswith(("cli_", "datastore_", "vmm_"))
    }
    for action, cases in by_action.items():
        assert any("error" not in case for case in cases), action
        assert any("error" in case for case in cases), f"{action} has no case of a refusal"
