# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a mount, and what is wrong with it: lines as Linux 6.1 wrote them (tests/nfs reads
real ones).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from semishared.install import preflight
from semishared.plan.care import diagnosis, diagnosis_machines

HEAD = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
29 22 0:25 / /var/lib/one rw,nosuid - xfs /dev/vdb rw,attr2,noquota
30 29 0:30 / /var/lib/one/datastores/with\\040space rw - tmpfs tmpfs rw
"""
V4 = "rw,vers=4.2,rsize=65536,wsize=65536,namlen=255,hard,proto=tcp,timeo=600,retrans=2,sec=sys,clientaddr=10.99.7.2,{}local_lock=none"  # noqa: E501
V3 = "rw,vers=3,rsize=65536,wsize=65536,namlen=255,hard,{}proto=tcp,timeo=600,retrans=2,sec=sys,mountvers=3,local_lock={}"  # noqa: E501
STORE = "/var/lib/one/datastores/100"


def mountinfo(type: str, options: str, point: str = STORE) -> str:
    return f"{HEAD}36 29 0:31 / {point} rw,relatime shared:3 - {type} 10.99.7.1:/ {options},addr=10.99.7.1\n"


def findings(mount: dict[str, Any]) -> list[diagnosis.Finding]:
    """Judge as doctor does."""
    answer: dict[str, Any] = {
        "python": [3, 11, 2],
        "lacks": {"needed": [], "wanted": []},
        "programs": {},
        "user": "oneadmin",
        "tree": {"version": "x", "parts": {"lib/semishared": "a"}},
        "stores": {STORE: {"empty": False, "same": True, "writable": True, "mount": mount}},
    }
    return diagnosis_machines.of_machines(
        {"fe": answer, "h1": answer}, diagnosis.Site("fe"), diagnosis.Cloud(), ("0", "0")
    )


@pytest.mark.fault(
    18, "doctor finds stores on NFSv3, with locks of one host only, soft, or without lookupcache=positive"
)
@pytest.mark.parametrize(
    ("type", "options", "wanted"),
    [
        ("nfs4", V4.format(""), [(diagnosis.WARNING, "without lookupcache=positive")]),
        (
            "nfs4",
            V4.format("lookupcache=pos,").replace("hard", "soft"),
            [(diagnosis.WARNING, "mounted soft")],
        ),
        (
            "nfs4",
            V4.format("lookupcache=pos,").replace("hard", "hard,softreval"),
            [(diagnosis.WARNING, "softreval")],
        ),
        (
            "nfs4",
            V4.format("lookupcache=pos,").replace("=none", "=posix"),
            [(diagnosis.BROKEN, "local_lock=posix")],
        ),
        ("nfs", V3.format("lookupcache=pos,", "none"), [(diagnosis.BROKEN, "NFS version 3")]),
        (
            "nfs",
            V3.format("lookupcache=pos,nolock,", "all"),
            [(diagnosis.BROKEN, "NFS version 3"), (diagnosis.BROKEN, "nolock")],
        ),
        (
            "nfs",
            V3.format("lookupcache=pos,", "flock"),
            [(diagnosis.BROKEN, "NFS version 3"), (diagnosis.BROKEN, "local_lock=flock")],
        ),
    ],
    ids=["lookupcache", "soft", "softreval", "local_lock", "version 3", "nolock", "version 3 with flock"],
)
def test_a_store_that_others_cannot_trust_is_found(
    type: str, options: str, wanted: list[tuple[int, str]]
) -> None:
    found = findings({"type": type, "options": options.split(",")})
    for machine in ("fe", "h1"):
        here = [item for item in found if item.machine == machine]
        assert [item.severity for item in here] == [severity for severity, _ in wanted], here
        assert all(text in item.what and "nfs.md" in item.mend for item, (_, text) in zip(here, wanted)), here


@pytest.mark.parametrize(
    ("type", "options"),
    [
        ("nfs4", V4.format("lookupcache=pos,")),
        ("nfs4", V4.format("lookupcache=none,")),
        ("nfs4", V4.format("lookupcache=pos,").replace("4.2", "4.1")),
        ("fuse.ceph-fuse", "rw,soft"),
        ("xfs", "rw"),
    ],
)
def test_a_store_that_is_as_it_should_be_is_no_finding(type: str, options: str) -> None:
    assert findings({"type": type, "options": options.split(",")}) == []


def test_the_mount_of_a_path_is_the_innermost_and_the_last() -> None:
    mount_of = preflight.mount_of
    text = mountinfo("nfs4", V4.format(""))
    assert mount_of(STORE, text)["type"] == mount_of(f"{STORE}/x/y", text)["type"] == "nfs4"
    assert "vers=4.2" in mount_of(STORE, text)["options"] and "relatime" in mount_of(STORE, text)["options"]
    assert mount_of(f"{STORE}0", text)["type"] == "xfs" and mount_of("/srv", text)["type"] == "ext4"
    assert mount_of("/var/lib/one/datastores/with space", text)["type"] == "tmpfs"
    covered = mountinfo("autofs", "rw,fd=5") + mountinfo("nfs", V3.format("", "none"))
    assert mount_of(STORE, covered)["type"] == "nfs"
    assert mount_of("/", "nonsense\n") == {}


@pytest.mark.parametrize(("mode", "is_passable"), [(0o750, False), (0o751, True), (0o774, False)])
def test_a_store_is_passable_only_for_whom_everybody_may_pass(
    tmp_path: Path, mode: int, is_passable: bool
) -> None:
    tmp_path.chmod(mode)
    assert preflight.store_state(str(tmp_path), "token")["passable"] is is_passable
