# SPDX-License-Identifier: Apache-2.0
"""Which host is meant: oned tells it by an id, machines are told from each other by where names lead, and
nobody by a label of a name.
"""

from __future__ import annotations

import _socket
import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from semishared.cli import failover as cli
from semishared.config import Config
from semishared.errors import NotSupported
from semishared.front import fence_facts, front_ends, move
from semishared.model.exchange import On
from semishared.opennebula.args import Backup
from semishared.opennebula.xml import Datastore, Host, Image, Vm
from semishared.plan.care import diagnosis, diagnosis_machines, fence
from semishared.plan.disk import backup
from semishared.tools import this_machine
from unit.sources import nodes

LIB = Path(__file__).resolve().parents[2] / "lib" / "semishared"

# -- oned's ids ------------------------------------------------------------------------------------


def host(number: int, name: str, mark: str = "") -> Host:
    rows = f"<ID>{number}</ID><NAME>{name}</NAME><STATE>3</STATE><CLUSTER_ID>7</CLUSTER_ID>"
    return Host.parse(f"<HOST>{rows}<TEMPLATE>{mark}</TEMPLATE></HOST>")


def vm(number: int, *stays: Tuple[int, str], lcm: int = 16) -> Vm:
    disk = "<DISK><DISK_ID>0</DISK_ID><IMAGE_ID>3</IMAGE_ID></DISK>"
    rows = "".join(f"<HISTORY><HOSTNAME>{name}</HOSTNAME><HID>{hid}</HID></HISTORY>" for hid, name in stays)
    return Vm.parse(
        f"<VM><ID>{number}</ID><STATE>3</STATE><LCM_STATE>{lcm}</LCM_STATE><TEMPLATE>{disk}</TEMPLATE>"
        f"<HISTORY_RECORDS>{rows}</HISTORY_RECORDS></VM>"
    )


class Known:
    """An oned in which host 5 was called `old` until a minute ago, is `new`, and another host is `old`
    now.
    """

    def __init__(self, mark: str = "") -> None:
        self._hosts = [host(5, "new", mark), host(9, "old")]
        found = [
            vm(1, (5, "new")),
            vm(2, (5, "old"), (9, "old"), lcm=61),
            vm(3, (9, "old")),
            vm(4, (5, "old"), (9, "old")),
        ]
        self._vms = {item.id: item for item in found}

    def hosts(self) -> List[Host]:
        return self._hosts

    def datastores(self) -> List[Datastore]:
        return [
            Datastore.parse(
                "<DATASTORE><ID>100</ID><NAME>ours</NAME><TM_MAD>semishared</TM_MAD><TYPE>0</TYPE><TEMPLATE/></DATASTORE>"
            )
        ]

    def images(self) -> List[Image]:
        of = "<DATASTORE_ID>100</DATASTORE_ID><SOURCE>/store/x</SOURCE><PERSISTENT>1</PERSISTENT>"
        return [Image.parse(f"<IMAGE><ID>3</ID>{of}</IMAGE>")]

    def front_ends(self) -> List[List[str]]:
        return []

    def vms(self) -> List[Vm]:
        return list(self._vms.values())

    def vm(self, number: int) -> Vm:
        return self._vms[number]


@pytest.mark.fault(
    31, "the VMs of a host that was renamed are its own, and none is of the host that has its name by now"
)
def test_a_renamed_host_keeps_its_vms() -> None:
    oned: Any = Known()
    assert [found.id for found in fence_facts._guests(oned, 5)] == [1, 2]
    assert [found.id for found in fence_facts._guests(oned, 9)] == [2, 3, 4]
    assert [found.id for found in cli.those_of(oned, 5)] == [1, 2]
    assert fence_facts.ask(oned, "new").disks == ((100, "/store/x"),) * 2


@pytest.mark.fault(
    31, "what a renamed host has left comes up elsewhere by its own fence, not by that of who has its name"
)
@pytest.mark.parametrize(("is_fenced", "why"), [(True, ""), (False, "old is not fenced")])
def test_a_renamed_host_is_the_one_that_was_fenced(
    is_fenced: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from semishared.front.fence import Fence

    asked: List[str] = []
    monkeypatch.setattr(Fence, "proof", lambda self, name: asked.append(name))
    marks = {
        "new": fence.Mark("fenced" if is_fenced else ""),
        "old": fence.Mark("" if is_fenced else "fenced"),
    }
    monkeypatch.setattr(fence_facts, "Marks", lambda _: SimpleNamespace(of=lambda host: marks[host.name]))
    monkeypatch.setattr(Fence, "__init__", lambda self, *_: None)
    oned: Any = Known()
    action: Any = type("Action", (), {"config": Config()})
    assert move._why_not_fenced(oned, action, oned.vm(2), "old") == why
    assert asked == ["new"] * is_fenced


# -- two names of one machine ------------------------------------------------------------------------


@pytest.mark.fault(
    31, "a bridge that BRIDGE_LIST calls otherwise than OpenNebula does is the host that it is"
)
def test_a_bridge_under_another_name_is_that_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fence_facts, "are_one", lambda name, other: {name, other} == {"H1.storage.example", "h1"}
    )

    class Fencer:
        fsid = "f"

        def __init__(self, *words: object) -> None:
            pass

        def openers(self, pool: str) -> Tuple[List[str], List[Any]]:
            return [], []

        def look(self) -> Tuple[None, frozenset[str]]:
            return None, frozenset({"10.0.0.1"})

    monkeypatch.setattr(fence_facts, "Fencer", Fencer)
    monkeypatch.setattr(fence_facts, "reached", lambda datastores: (None, ""))
    store = Datastore.parse(
        "<DATASTORE><TEMPLATE><BRIDGE_LIST>H1.storage.example h2</BRIDGE_LIST></TEMPLATE></DATASTORE>"
    )
    cloud = fence_facts.Cloud(host(1, "h1"), [], [], [], (), [], ())
    _, ceph = fence_facts.look(cloud, [store])
    machines = fence.Machines("h1", {"h1": frozenset({"10.0.0.1"})}, frozenset())
    assert any("h1 is a bridge" in text for text in fence.blocks(ceph, machines, ()).missing)


@pytest.mark.fault(
    31,
    "a front-end that shares an address with a host, as all have that of libvirt's bridge, is not "
    "taken for it",
)
def test_a_front_end_with_an_address_of_the_hosts_is_nobodys_to_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leads = {
        "fe2": ("10.0.0.2", "192.168.122.1"),
        "h1": ("10.0.0.3", "192.168.122.1"),
        "fe3": ("10.0.0.4", "192.168.122.1"),
    }
    monkeypatch.setattr(
        _socket,
        "getaddrinfo",
        lambda name, *_, **__: [(2, 1, 0, "", (ip, 0)) for ip in leads.get(name, (name,))],
    )
    this_machine.are_one.cache_clear()
    oned: Any = SimpleNamespace(front_ends=lambda: [["fe2", "fe3"]])
    assert front_ends.addresses_but(oned, "h1") == {"10.0.0.2", "10.0.0.4", "192.168.122.1"}
    assert front_ends.addresses_but(oned, "10.0.0.4") == {"10.0.0.2", "192.168.122.1"}, (
        "one that is the host is not among them"
    )
    this_machine.are_one.cache_clear()


@pytest.mark.fault(31, "a backup goes to a bridge that is the VM's host, whatever it is called there")
@pytest.mark.parametrize(("bridge", "is_refused"), [("H1.storage.example", False), ("h2", True)])
def test_a_backup_by_the_host_under_another_name(bridge: str, is_refused: bool) -> None:
    config = f"<BACKUPS><BACKUP_CONFIG><LAST_BRIDGE>{bridge}</LAST_BRIDGE></BACKUP_CONFIG></BACKUPS>"
    found = Vm.parse(f"<VM><ID>7</ID>{config}<TEMPLATE><DISK><DISK_ID>0</DISK_ID></DISK></TEMPLATE></VM>")
    asked = Backup.parse(["h1:/var/lib/one/datastores/101/7", "0", "", "-", "7", "101"])
    plan = backup.prebackup(
        asked,
        found,
        "",
        "",
        live=False,
        are_one=lambda name, other: {name, other} == {"H1.storage.example", "h1"},
    )
    if is_refused:
        with pytest.raises(NotSupported, match="BRIDGE_LIST"):
            next(plan)
    else:
        wanted = next(plan)
        assert isinstance(wanted, On) and wanted.machine == "h1"


def answer(machine: str) -> Dict[str, Any]:
    return {"signed": {"/ds/.semishared": {"place": "/ds", "machine": machine, "count": 3, "seen": {}}}}


@pytest.mark.fault(
    31,
    "doctor says which names in OpenNebula are of one machine, and that HOSTNAME of oned.conf "
    "does not lead to it",
)
def test_doctor_names_what_goes_by_two_names() -> None:
    one, two = answer("a" * 16), answer("b" * 16)
    answers: Any = {"h1": one, "h2": two, "h1.storage.example": one, "h3": "does not answer", "h4": {}}
    (found,) = diagnosis_machines._one_machine(answers)
    assert found.severity == diagnosis.BROKEN and found.what.startswith(
        "h1 and h1.storage.example are one machine"
    )
    assert diagnosis.of_site(diagnosis.Site("fe")) == []
    (found,) = diagnosis.of_site(diagnosis.Site("fe", lost_name="one.example"))
    assert found.severity == diagnosis.BROKEN and "HOSTNAME of oned.conf is one.example" in found.what


# -- every place ------------------------------------------------------------------------------------

NAMES = {"host", "hosts", "machine", "bridge", "front_end", "source_host", "target_host", "nodename", "node"}
COMPARED = {
    "OpenNebula has one name for a host, and both are from it: from one answer, or arguments of one action": (
        "cli/detach.py",
        "front/clusters.py",
        "front/detach.py",
        "front/migration.py",
        "front/staging.py",
        "front/staging_look.py",
        "front/staging_round.py",
        "opennebula/xml.py",
        "plan/disk/detach.py",
        "plan/vm/live_migration.py",
        "plan/vm/migration.py",
        "plan/vm/moves.py",
        "plan/device/pool_rows.py",
        "plan/base/sharing.py",
        "plan/base/sharing.py",
        "plan/base/sharing.py",
    ),
    "names of peers that one action was given, or hints of whom to ask first": (
        "stage/bases_in_progress.py",
        "stage/fetch_from_sources.py",
        "front/questions.py",
    ),
    "names that the command has given to machines itself: the front-end has that of OpenNebula, "
    "if that has one for it": (
        "cli/commit.py",
        "plan/care/attention.py",
        "cli/doctor.py",
        "cli/gc.py",
        "cli/status.py",
        "front/action.py",
        "plan/care/diagnosis.py",
        "plan/care/diagnosis_machines.py",
        "plan/care/diagnosis_shares.py",
    ),
    "addresses of front-ends as oned's zone has them, by which the same answer's machines are asked": (
        "wire/session.py",
    ),
    "front/fence_facts.py has seen which bridges are the host": ("plan/care/fence.py",),
    "oned's own, and any other by are_one": ("front/bulk_network.py",),
    "ids, not names": ("cli/failover.py", "front/fence_facts.py", "plan/care/gc_places.py", "tools/owner.py"),
    "the form of names": ("install/main.py", "model/disk/network_disk.py", "plan/libvirt/domain.py"),
    "what a label says, to an operator who asks for that device, where the host's own notes are "
    "lost; and its id": ("device/label.py",),
}


def _called(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _compared(text: str) -> Iterator[str]:
    """Yield where a name of a machine is compared with what is no constant, or taken apart."""
    for node in nodes(text):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            is_named = any(_called(side) in NAMES for side in sides) and not any(
                isinstance(side, ast.Constant) for side in sides
            )
            if is_named and isinstance(node.ops[0], (ast.Eq, ast.NotEq, ast.In, ast.NotIn)):
                yield ast.unparse(node)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and _called(node.func.value) in NAMES
        ):
            if node.func.attr in ("split", "partition", "startswith", "rpartition"):
                yield ast.unparse(node)


@pytest.mark.fault(
    31, "names of machines are compared in these places alone, each for a reason, and labels of them nowhere"
)
def test_where_names_of_machines_are_compared() -> None:
    found: Dict[str, List[str]] = {}
    for path in sorted(LIB.rglob("*.py")):
        where = list(_compared(path.read_text(encoding="utf-8")))
        if where:
            found[str(path.relative_to(LIB))] = where
    known = {path for paths in COMPARED.values() for path in paths}
    assert set(found) <= known, {path: found[path] for path in set(found) - known}
    assert set(found) == known
    assert not [
        text for texts in found.values() for text in texts if "partition('.')" in text or "split('.')" in text
    ]
