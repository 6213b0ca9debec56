# SPDX-License-Identifier: Apache-2.0
"""By what libvirt confines QEMU on a host, as libvirt 9.0 said it, and what doctor makes of that."""

from __future__ import annotations

from typing import Any

import pytest

from semishared.install import preflight
from semishared.plan.care import diagnosis, diagnosis_machines

STORE = "/var/lib/one/datastores/100"
CAPABILITIES = """<capabilities>
  <host>
    <uuid>0a5d4c34-6c5a-4a4e-9d3c-d5a3f0b2f3f1</uuid>
    {}<secmodel>
      <model>dac</model>
      <doi>0</doi>
      <baselabel type='kvm'>+9869:+9869</baselabel>
    </secmodel>
  </host>
  <guest>
    <secmodel><model>selinux</model></secmodel>
  </guest>
</capabilities>
"""
MODEL = "<secmodel>\n      <model>{}</model>\n      <doi>0</doi>\n    </secmodel>\n    "


@pytest.mark.parametrize(
    ("model", "wanted"), [("apparmor", ["apparmor"]), ("selinux", ["selinux"]), ("none", []), ("", [])]
)
def test_what_libvirt_confines_qemu_by(model: str, wanted: list[str]) -> None:
    assert preflight.confines(CAPABILITIES.format(MODEL.format(model) if model else "")) == wanted


def test_libvirt_that_says_nothing_confines_by_nothing() -> None:
    assert preflight.confines("error: failed to connect to the hypervisor") == []
    assert preflight.qemu_user("error: failed to connect to the hypervisor") == ""


@pytest.mark.fault(73, "doctor says that libvirt runs QEMU as another user than the one whose the disks are")
def test_which_user_qemu_is() -> None:
    said = CAPABILITIES.format(MODEL.format("selinux"))
    assert preflight.qemu_user(said.replace("+9869:", "+0:")) == "root"
    assert preflight.qemu_user(said.replace("+9869:", "+999999999:")) == "999999999"
    assert preflight.qemu_user(said.replace("+9869:+9869", "u:object_r")) == ""


def findings(confines: list[str], type: str, passable: bool) -> list[diagnosis.Finding]:
    mount = {"type": type, "options": ["vers=4.2", "lookupcache=pos", "hard"]}
    answer: dict[str, Any] = {
        "python": [3, 11, 2],
        "lacks": {"needed": [], "wanted": []},
        "programs": {},
        "user": "oneadmin",
        "tree": {"version": "x", "parts": {"lib/semishared": "a"}},
        "libvirt": {"secrets": [], "confines": confines},
        "stores": {
            STORE: {"empty": False, "same": True, "writable": True, "mount": mount, "passable": passable}
        },
    }
    found = diagnosis_machines.of_machines(
        {"fe": answer, "h1": answer}, diagnosis.Site("fe"), diagnosis.Cloud(), ("0", "0")
    )
    return [item for item in found if item.machine == "h1"]


@pytest.mark.fault(
    20, "doctor finds a store on NFS into which libvirt's squashed root may not go, where AppArmor is on"
)
def test_store_that_a_squashed_root_may_not_enter_is_found_where_apparmor_is_on() -> None:
    (found,) = findings(["apparmor"], "nfs4", passable=False)
    assert found.severity == diagnosis.WARNING and "AppArmor" in found.what
    assert f"chmod o+x {STORE}" in found.mend and "apparmor.md" in found.mend


@pytest.mark.parametrize(
    ("confines", "type", "passable"),
    [(["apparmor"], "nfs4", True), (["apparmor"], "xfs", False), ([], "nfs4", False)],
)
def test_confined_host_with_stores_as_they_should_be_is_no_finding(
    confines: list[str], type: str, passable: bool
) -> None:
    assert findings(confines, type, passable) == []


def test_selinux_is_said_to_be_untried() -> None:
    (found,) = findings(["selinux"], "nfs4", passable=True)
    assert found.severity == diagnosis.WARNING and "SELinux" in found.what
