# SPDX-License-Identifier: Apache-2.0
"""VMs that are started and watched while oned answers, and does not."""

from __future__ import annotations

from typing import Any, Dict, List
from xml.sax.saxutils import escape

import pytest

from semishared.config import Config
from semishared.errors import OnedUnavailable
from semishared.front import clusters
from semishared.front.staging_round import Wish
from semishared.opennebula.xml import Datastore, Host, View, Vm, parse
from semishared.plan.care.vm_placement import Placement


class Oned:
    """Two VMs; `away` is how often from now on nothing is said."""

    def __init__(self) -> None:
        self.states = {3: (8, 0), 4: (8, 0)}
        self.away = 0
        self.refused: List[int] = []

    def vm(self, number: int) -> Vm:
        if number in self.refused:
            raise OnedUnavailable(f"nothing of {number}")
        state, lcm = self.states[number]
        return Vm(
            parse(
                f"<VM><ID>{number}</ID><NAME>n</NAME><STATE>{state}</STATE><LCM_STATE>{lcm}</LCM_STATE><TEMPLATE/></VM>",
                "VM",
            )
        )

    def vms(self) -> List[Vm]:
        self.away -= 1
        if self.away >= 0:
            raise OnedUnavailable("away")
        return [self.vm(number) for number in self.states if number not in self.refused]

    def act(self, number: int, action: str) -> None:
        assert action == "resume"
        self.states[number] = (3, 3)


def booted(oned: Oned, monkeypatch: pytest.MonkeyPatch, limit_s: float = 60) -> Dict[int, Any]:
    monkeypatch.setattr(clusters, "POLL_S", 0.01)
    vms = [oned.vm(3), oned.vm(4)]
    oned.refused = [4] if oned.away < 0 else []
    boot = clusters.Boot(oned, Config(), lambda **_: None, Wish("auto", "auto", 0, True), limit_s)  # type: ignore[arg-type]
    return {row["vm"]: (row["how"], row["why"]) for row in boot.run(vms, None)}


def test_vm_of_which_oned_says_nothing_is_not_started_and_the_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    oned = Oned()
    oned.away = -1
    assert booted(oned, monkeypatch) == {3: ("booted", ""), 4: ("failed", "nothing of 4")}


def test_started_ones_are_watched_on_after_oned_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    oned = Oned()
    oned.away = 3
    assert booted(oned, monkeypatch) == {3: ("booted", ""), 4: ("booted", "")}


def test_oned_that_stays_away_ends_it_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    oned = Oned()
    oned.away = 1 << 20
    assert booted(oned, monkeypatch, 0.05) == {3: ("failed", "away"), 4: ("failed", "away")}


class Deploying(Oned):
    """Two VMs on no host; what is deployed comes up, and what is resumed waits for a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.states = {3: (9, 0), 4: (2, 0)}
        self.on = {3: "", 4: ""}
        self.template = {3: "", 4: ""}
        self.deployed: List[Any] = []
        self.full: List[int] = []
        self.quicker: List[int] = []

    def vm(self, number: int) -> Vm:
        found = super().vm(number)
        automatic = "(CLUSTER_ID = 0 | CLUSTER_ID = 5) & !(PIN_POLICY = PINNED)"
        for tag in ("TEMPLATE", "USER_TEMPLATE"):
            for old in found.element.findall(tag):
                found.element.remove(old)
        more = f"<AUTOMATIC_REQUIREMENTS>{escape(automatic)}</AUTOMATIC_REQUIREMENTS>"
        found.element.append(parse(f"<TEMPLATE><MEMORY>1024</MEMORY>{more}</TEMPLATE>", "TEMPLATE"))
        found.element.append(
            parse(f"<USER_TEMPLATE>{self.template[number]}</USER_TEMPLATE>", "USER_TEMPLATE")
        )
        where = self.on[number] or "h9"
        names = f"<HID>{where[1:]}</HID><HOSTNAME>{where}</HOSTNAME>"
        record = f"<HISTORY><SEQ>0</SEQ>{names}<DS_ID>102</DS_ID></HISTORY>"
        found.element.append(parse(f"<HISTORY_RECORDS>{record}</HISTORY_RECORDS>", "HISTORY_RECORDS"))
        return found

    def hosts(self) -> List[Host]:
        return [host(number) for number in (1, 2, 3)]

    def datastores(self) -> List[Datastore]:
        return [system(101), system(102)]

    def vm_groups(self) -> List[Any]:
        return []

    def images(self) -> List[Any]:
        return []

    def deploy(self, number: int, where: int, datastore: int) -> None:
        if number in self.quicker:
            self.states[number], self.on[number] = (3, 3), "h7"
        if number in (*self.full, *self.quicker):
            raise OnedUnavailable("one.vm.deploy: Not enough capacity")
        self.deployed.append((number, where, datastore))
        self.states[number], self.on[number] = (3, 3), f"h{where}"


def host(number: int, state: int = 2, used: int = 0, more: str = "") -> Host:
    share = f"<HOST_SHARE><MAX_MEM>{4 << 20}</MAX_MEM><MEM_USAGE>{used << 20}</MEM_USAGE></HOST_SHARE>"
    about = f"<ID>{number}</ID><NAME>h{number}</NAME><STATE>{state}</STATE><CLUSTER_ID>0</CLUSTER_ID>"
    return Host(parse(f"<HOST>{about}{share}<TEMPLATE>{more}</TEMPLATE></HOST>", "HOST"))


def system(
    number: int, driver: str = "semishared", clusters: str = "<ID>0</ID>", state: int = 0
) -> Datastore:
    about = f"<ID>{number}</ID><TYPE>1</TYPE><TM_MAD>{driver}</TM_MAD><STATE>{state}</STATE>"
    return Datastore(
        parse(f"<DATASTORE>{about}<CLUSTERS>{clusters}</CLUSTERS><TEMPLATE/></DATASTORE>", "DATASTORE")
    )


def placed(oned: Deploying, monkeypatch: pytest.MonkeyPatch) -> Dict[int, Any]:
    """Boot both on h1 and h2."""
    monkeypatch.setattr(clusters, "POLL_S", 0.01)
    boot = clusters.Boot(oned, Config(), lambda **_: None, Wish("auto", "auto", 0, True), 5)  # type: ignore[arg-type]
    return {
        row["vm"]: (row["how"], row["why"]) for row in boot.run([oned.vm(3), oned.vm(4)], oned.hosts()[:2])
    }


@pytest.mark.fault(61, "cluster boot --hosts has VMs run on these hosts, and changes nothing in them")
def test_vms_on_no_host_are_spread_over_the_named_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    oned = Deploying()
    assert placed(oned, monkeypatch) == {3: ("booted", ""), 4: ("booted", "")}
    # The undeployed one stays in the system datastore that has its files; the new one has the first.
    assert [(number, store) for number, _, store in oned.deployed] == [(3, 102), (4, 101)]
    assert sorted(where for _, where, _ in oned.deployed) == [1, 2], "by the memory that the first has got"


def test_a_vm_that_no_host_takes_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    oned = Deploying()
    oned.full = [3]
    found = placed(oned, monkeypatch)
    assert found[4] == ("booted", "") and found[3][0] == "failed"
    assert found[3][1].startswith("no host of --hosts takes it: h") and "Not enough capacity" in found[3][1]
    assert oned.states[3] == (9, 0)


def test_a_scheduler_that_is_quicker_has_placed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    oned = Deploying()
    oned.quicker = [4]
    assert placed(oned, monkeypatch)[4] == (
        "elsewhere",
        "it is on h7, none of --hosts: the scheduler was first",
    )


def test_what_else_decides_leaves_a_vm_to_the_scheduler() -> None:
    def why(
        user: str = "", template: str = "", automatic: str = "!(PIN_POLICY = PINNED)", group: str = ""
    ) -> str:
        said = f"<AUTOMATIC_REQUIREMENTS>{escape(automatic)}</AUTOMATIC_REQUIREMENTS>"
        vm = Vm(
            parse(
                f"<VM><TEMPLATE>{said}{template}</TEMPLATE><USER_TEMPLATE>{user}</USER_TEMPLATE></VM>", "VM"
            )
        )
        groups = [View(parse(f"<VM_GROUP><ID>4</ID>{group}</VM_GROUP>", "VM_GROUP"))]
        return Placement([host(1)], [system(101)], groups).why_scheduled(vm)

    member = "<VMGROUP><ROLE>a</ROLE><VMGROUP_ID>4</VMGROUP_ID></VMGROUP>"
    both = "(CLUSTER_ID = 0 | CLUSTER_ID = 17) & !(PUBLIC_CLOUD = YES) & !(PIN_POLICY = PINNED)"
    assert why() == why(automatic=both) == why(template=member) == ""
    assert why(template=member, group="<ROLES><ROLE><POLICY>NONE</POLICY></ROLE></ROLES>") == ""
    for rule in (
        "<ROLES><ROLE><POLICY>ANTI_AFFINED</POLICY></ROLE></ROLES>",
        "<ROLES><ROLE/><ROLE><HOST_AFFINED>3</HOST_AFFINED></ROLE></ROLES>",
        "<TEMPLATE><AFFINED>a, b</AFFINED></TEMPLATE>",
    ):
        assert why(template=member, group=rule) == "the rules of its VM group"
        assert why(group=rule) == "", "it is not in that group"
    assert why("<SCHED_REQUIREMENTS>FREE_CPU &gt; 1</SCHED_REQUIREMENTS>") == "its SCHED_REQUIREMENTS"
    assert why("<SCHED_DS_REQUIREMENTS>x</SCHED_DS_REQUIREMENTS>") == "its SCHED_DS_REQUIREMENTS"
    assert "NETWORK_MODE" in why(template="<NIC><NETWORK_MODE>auto</NETWORK_MODE></NIC>")
    for automatic in (
        "(CLUSTER_ID = 0) & (PIN_POLICY = PINNED)",
        '!(PIN_POLICY = PINNED) & (KVM_CPU_FEATURES = "*avx*")',
        "",
    ):
        assert why(automatic=automatic) == "its AUTOMATIC_REQUIREMENTS"


def test_where_a_vm_may_be_deployed() -> None:
    def at(
        systems: List[Datastore], hosts: List[Host], clusters_of: str = "", said: str = "", state: int = 1
    ) -> List[Any]:
        words = f"{clusters_of}!(PIN_POLICY = PINNED)"
        inner = "".join(
            f"<AUTOMATIC_{name}>{escape(text)}</AUTOMATIC_{name}>"
            for name, text in (("REQUIREMENTS", words), ("DS_REQUIREMENTS", said))
        )
        records = "<HISTORY_RECORDS><HISTORY><DS_ID>103</DS_ID></HISTORY></HISTORY_RECORDS>"
        text = f"<VM><STATE>{state}</STATE>{records}<TEMPLATE>{inner}</TEMPLATE></VM>"
        found = Placement(hosts, systems, []).targets(Vm(parse(text, "VM")))
        return [(target.host.id, target.datastore) for target in found]

    systems = [system(103), system(102), system(101, "ssh"), system(100, state=1)]
    assert at(systems, [host(1, used=3), host(2), host(3, used=1)]) == [(2, 102), (3, 102), (1, 102)]
    # Not monitored, offline, for pinned VMs alone, in another cluster.
    hosts = [host(1, 3), host(2, 8), host(3, more="<PIN_POLICY>PINNED</PIN_POLICY>"), host(4)]
    assert at(systems, hosts) == [(4, 102)] and at(systems, hosts, "(CLUSTER_ID = 10) & ") == []
    assert at(systems, [host(1)], said='("CLUSTERS/ID" @> 0) & ("ID" @> 103 | "ID" @> 104)') == [(1, 103)]
    assert at(systems, [host(1)], said='("CLUSTERS/ID" @> 6)') == []
    assert at([system(102, clusters="<ID>6</ID>")], [host(1)]) == []
    assert at(systems, [host(1)], state=9) == [(1, 103)], "where its files are"
