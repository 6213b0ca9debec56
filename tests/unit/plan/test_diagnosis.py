# SPDX-License-Identifier: Apache-2.0
"""What doctor makes of what machines, oned and gc said: each finding whole, with the very words that mend
it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Mapping
from xml.etree import ElementTree

import pytest

from semishared.model.platforms import PROGRAMS
from semishared.opennebula.xml import Datastore, Host, Image, View
from semishared.plan.care.diagnosis import (
    BROKEN,
    WARNING,
    Cloud,
    Finding,
    Site,
    of_cloud,
    of_leftovers,
    of_site,
    of_stock_images,
    of_unseen,
)
from semishared.plan.care.diagnosis_machines import Answers, of_machines

CHECKOUT = Path(__file__).resolve().parents[3]
STORE, SYSTEM = "/var/lib/one/datastores/100", "/var/lib/one/datastores/101"
LOCAL = "/var/lib/one/datastores/.semishared"
MARKER, SECRET, REMOTE = (
    "0123456789abcdef" * 2,
    "c7f6f1a2-6c1e-4d0b-9a53-0d6c8a1f3b11",
    "d8a7f1a2-6c1e-4d0b-9a53-0d6c8a1f3b22",
)
SIZES = ("80%", "1G")
GIB = 1 << 30


def element(kind: str, about: Mapping[str, str], template: Mapping[str, str]) -> ElementTree.Element:
    """Return an object of OpenNebula's as it describes it."""
    root = ElementTree.Element(kind)
    for name, value in about.items():
        ElementTree.SubElement(root, name).text = value
    inner = ElementTree.SubElement(root, "TEMPLATE")
    for name, value in template.items():
        ElementTree.SubElement(inner, name).text = value
    return root


def store(**template: str) -> Datastore:
    about = {
        "ID": "100",
        "NAME": "semi images",
        "TYPE": "0",
        "TM_MAD": "semishared",
        "DS_MAD": "semishared",
        "BASE_PATH": STORE,
    }
    return Datastore(element("DATASTORE", about, template))


def system() -> Datastore:
    about = {
        "ID": "101",
        "NAME": "it's_sys",
        "TYPE": "1",
        "TM_MAD": "semishared",
        "DS_MAD": "",
        "BASE_PATH": SYSTEM,
    }
    return Datastore(element("DATASTORE", about, {"SHARED": "NO"}))


def ceph() -> Datastore:
    about = {
        "ID": "110",
        "NAME": "ceph",
        "TYPE": "0",
        "TM_MAD": "semishared",
        "DS_MAD": "semishared",
        "BASE_PATH": "/x/110",
    }
    template = {
        "DISK_TYPE": "RBD",
        "POOL_NAME": "one",
        "CEPH_USER": "libvirt",
        "CEPH_SECRET": SECRET,
        "SEMISHARED_CEPH_REMOTE": "reader",
        "SEMISHARED_CEPH_REMOTE_SECRET": REMOTE,
    }
    return Datastore(element("DATASTORE", about, template))


def host(**template: str) -> Host:
    return Host(element("HOST", {"ID": "0", "NAME": "h1"}, template))


def answer(**more: Any) -> dict[str, Any]:
    """Return what a sound machine says of itself."""
    return {
        "python": [3, 11, 2],
        "lacks": {"needed": [], "wanted": []},
        "programs": {"qemu-img": "7.2.22"},
        "user": "oneadmin",
        "tree": {"version": "x", "parts": {"lib/semishared": "a"}},
        **more,
    }


def state(**more: Any) -> dict[str, Any]:
    """Return what a machine says of a sound store."""
    return {
        "empty": False,
        "same": True,
        "writable": True,
        "marker": MARKER,
        "mount": {},
        "passable": True,
        **more,
    }


def local(**more: Any) -> dict[str, Any]:
    """Return what a host says of its own sound disk."""
    sound = {
        "where": LOCAL,
        "free": 50 * GIB,
        "total": 100 * GIB,
        "inodes": 9,
        "no_inodes": False,
        "writable": True,
        "read_only": False,
    }
    return {**sound, **more}


def of_h1(said: dict[str, Any] | str, cloud: Cloud, **front_end: Any) -> list[Finding]:
    """Return what is found where h1 says this and the front-end is sound."""
    answers: Answers = {"fe": answer(**front_end), "h1": said}
    return of_machines(answers, Site("fe"), cloud, SIZES)


SOUND = Cloud([store(SEMISHARED_STORE=MARKER), system()], hosts=[host()])
"""A cloud whose store is marked."""
OLD_STORE = Cloud([store(), system()], hosts=[host()])
"""One whose store is not."""


@pytest.mark.fault(67, "doctor names a libvirt and a QEMU that are older than any in which a guest was tried")
def test_hosts_below_the_floor_are_named() -> None:
    old = answer(libvirt={"secrets": [], "libvirt": "6.9.0", "qemu": "5.1.0"}, local=local())
    assert [(found.severity, found.machine, found.what) for found in of_h1(old, SOUND)] == [
        (BROKEN, "h1", "libvirt 6.9.0 is older than 7.0"),
        (BROKEN, "h1", "guests run in QEMU 5.1.0, which is older than 5.2"),
    ]
    for versions in (("7.0.0", "5.2.0"), ("11.3.0", "10.0.13"), ("", "")):
        said = {"secrets": [], **dict(zip(("libvirt", "qemu"), versions))}
        assert of_h1(answer(libvirt=said, local=local()), SOUND) == []


def test_sound_host_is_no_finding() -> None:
    libvirt = {"secrets": [SECRET, REMOTE], "confines": []}
    said = answer(libvirt=libvirt, stores={STORE: state()}, local=local(), ceph={"one": {"error": ""}})
    assert of_h1(said, Cloud([store(SEMISHARED_STORE=MARKER), system(), ceph()], hosts=[host()])) == []


# What h1 says, and what is made of it: severity, what, what mends it.
MACHINES: dict[str, tuple[dict[str, Any] | str, Cloud, int, str, str]] = {
    "nothing": (
        "does not answer: refused",
        SOUND,
        BROKEN,
        "does not answer: refused",
        "as oneadmin: ssh h1 true; or onehost offline h1",
    ),
    "another user": (
        answer(user="root"),
        SOUND,
        WARNING,
        "ssh enters as root, not as oneadmin",
        "as oneadmin on fe: mend User for h1 in ~/.ssh/config",
    ),
    "old python": (
        answer(python=[3, 8, 10]),
        SOUND,
        BROKEN,
        "python3 is 3.8.10",
        "as root on h1: install python3 3.9 or newer",
    ),
    "old QEMU": (
        answer(programs={"qemu-img": "4.2.1"}),
        SOUND,
        BROKEN,
        "QEMU 4.2.1 is older than 5.2: no extended_l2",
        "as root on h1: update qemu",
    ),
    "no libvirt": (
        answer(libvirt={"error": "virsh hangs"}),
        SOUND,
        BROKEN,
        "libvirt does not answer: virsh hangs",
        "as root on h1: systemctl restart libvirtd",
    ),
    "a secret that libvirt lacks": (
        answer(libvirt={"secrets": [REMOTE]}),
        Cloud([ceph()]),
        BROKEN,
        f"libvirt does not know the secret {SECRET}",
        "docs/how-to/ceph.md, 4. libvirt",
    ),
    "the other one": (
        answer(libvirt={"secrets": [SECRET]}),
        Cloud([ceph()]),
        BROKEN,
        f"libvirt does not know the secret {REMOTE}",
        "docs/how-to/ceph.md, 4. libvirt",
    ),
    "a store that hangs": (
        answer(stores={STORE: {"error": "hangs"}}),
        SOUND,
        BROKEN,
        f"store {STORE}: hangs",
        f"as root on h1: mount {STORE} (docs/how-to/nfs.md)",
    ),
    "an empty directory": (
        answer(stores={STORE: state(same=False, empty=True)}),
        SOUND,
        BROKEN,
        f"store {STORE} is not mounted",
        f"as root on h1: mount {STORE}",
    ),
    "another file system": (
        answer(stores={STORE: state(same=False)}),
        SOUND,
        BROKEN,
        f"store {STORE} is another file system than on the front-end",
        f"as root on h1: mount {STORE}",
    ),
    "no marker": (
        answer(stores={STORE: state(marker="")}),
        SOUND,
        BROKEN,
        f"store {STORE} is not there, or has lost its marker",
        f"as root on h1: mount {STORE}; or semishared setup --apply --image 'semi images' "
        f"--system 'it'\\''s_sys'",
    ),
    "another's marker": (
        answer(stores={STORE: state(marker="f" * 32)}),
        SOUND,
        BROKEN,
        f"store {STORE} is another datastore's: its marker says {'f' * 32}",
        f"as root on h1: mend its line in /etc/fstab (docs/how-to/nfs.md), then umount and mount {STORE}",
    ),
    "a read-only store": (
        answer(stores={STORE: state(writable=False, reason="Read-only file system")}),
        SOUND,
        BROKEN,
        f"store {STORE} cannot be written by oneadmin: Read-only file system",
        f"as root where it is exported: chown oneadmin: {STORE}, and export it read-write",
    ),
    "a store mounted soft": (
        answer(
            stores={STORE: state(mount={"type": "nfs4", "options": ["vers=4.2", "lookupcache=pos", "soft"]})}
        ),
        SOUND,
        WARNING,
        f"store {STORE}: mounted soft: guests get I/O errors while the server is away; hard is wanted",
        f"as root on h1: mend its line in /etc/fstab (docs/how-to/nfs.md), then umount and mount {STORE}",
    ),
    "a store mounted by NFS 3": (
        answer(
            stores={STORE: state(mount={"type": "nfs", "options": ["vers=3", "lookupcache=pos", "hard"]})}
        ),
        SOUND,
        BROKEN,
        f"store {STORE}: NFS version 3: between its clients QEMU's image locks do not hold; "
        f"vers=4.2 is wanted",
        f"as root on h1: mend its line in /etc/fstab (docs/how-to/nfs.md), then umount and mount {STORE}",
    ),
    "a pool that it may not list": (
        answer(ceph={"one": {"error": "error: no permission"}}),
        SOUND,
        BROKEN,
        "pool one cannot be listed: error: no permission",
        "docs/how-to/ceph.md, 3. Keys",
    ),
    "a disk that gives errors": (
        answer(local={"error": f"Input/output error: {LOCAL}"}),
        SOUND,
        BROKEN,
        f"local store: Input/output error: {LOCAL}",
        "as root on h1: dmesg; mend or mount its disk (docs/how-to/dead-host.md if it is lost)",
    ),
    "a disk that is read-only": (
        answer(local=local(read_only=True)),
        SOUND,
        BROKEN,
        f"{LOCAL} is mounted read-only",
        f"as root on h1: dmesg; mount -o remount,rw {LOCAL}",
    ),
    "another's directory": (
        answer(local=local(writable=False)),
        SOUND,
        BROKEN,
        f"{LOCAL} cannot be written",
        f"as root on h1: chown oneadmin: {LOCAL}",
    ),
    "a disk nearly full": (
        answer(local=local(free=GIB - 1)),
        SOUND,
        WARNING,
        f"{LOCAL} has 1023 MiB free, 1024 MiB are to stay free",
        "semishared base prune --hosts h1; or migrate VMs away",
    ),
    "a full disk": (
        answer(local=local(free=0)),
        SOUND,
        BROKEN,
        f"{LOCAL} has 0 MiB free, 1024 MiB are to stay free",
        "semishared base prune --hosts h1; or migrate VMs away",
    ),
    "less than the host's own floor": (
        answer(local=local()),
        Cloud(hosts=[host(SEMISHARED_BASES_FLOOR="60%")]),
        WARNING,
        f"{LOCAL} has 51200 MiB free, 61440 MiB are to stay free",
        "semishared base prune --hosts h1; or migrate VMs away",
    ),
    "no inodes": (
        answer(local=local(inodes=0)),
        SOUND,
        BROKEN,
        f"{LOCAL} has no inodes left",
        "semishared gc; semishared base prune --hosts h1",
    ),
}


@pytest.mark.parametrize("said", MACHINES)
def test_what_a_host_says_and_what_mends_it(said: str) -> None:
    answered, cloud, severity, what, mend = MACHINES[said]
    assert of_h1(answered, cloud) == [Finding(severity, "h1", what, mend)]


@pytest.mark.parametrize("said", MACHINES)
def test_page_that_mends_it_is_there(said: str) -> None:
    """With the heading that is named after it."""
    for page, heading in re.findall(r"(docs/[\w/-]+\.md)(?:, ([^,;)]+))?", MACHINES[said][4]):
        text = (CHECKOUT / page).read_text()
        assert not heading or f"\n## {heading}\n" in text, heading


@pytest.mark.parametrize(("kind", "severity"), [("needed", BROKEN), ("wanted", WARNING)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_that_is_lacking(program: str, kind: str, severity: int) -> None:
    """Each platform's own words: test_platforms.py."""
    said = answer(lacks={"needed": [], "wanted": [], kind: [program]}, os={"id": "debian", "version": "13"})
    assert of_h1(said, SOUND) == [
        Finding(
            severity,
            "h1",
            f"{program} is not installed",
            f"as root on h1: apt-get install {PROGRAMS[program]}",
        )
    ]


@pytest.mark.parametrize(
    ("there", "what"),
    [
        ({"version": "", "parts": {"lib/semishared": ""}}, "semishared is not there"),
        ({"version": "y", "parts": {"lib/semishared": "b"}}, "semishared y is there, the front-end has x"),
        (
            {"version": "x", "parts": {"lib/semishared": "b"}},
            "not synced: lib/semishared is not the front-end's",
        ),
    ],
)
def test_host_that_is_not_synced(there: dict[str, Any], what: str) -> None:
    assert of_h1(answer(tree=there), SOUND) == [
        Finding(BROKEN, "h1", what, "as oneadmin: onehost sync --force")
    ]


@pytest.mark.parametrize(
    ("local_disk", "cloud"),
    [(local(inodes=0, no_inodes=True), SOUND), (local(free=GIB), SOUND), (local(free=0), Cloud())],
)
def test_disk_that_counts_no_inodes_has_enough_or_is_no_hosts(
    local_disk: dict[str, Any], cloud: Cloud
) -> None:
    assert of_h1(answer(local=local_disk), cloud) == []


def test_floor_that_is_nonsense_still_leaves_a_full_disk_broken() -> None:
    """The attribute is a finding of its own (of_cloud)."""
    (found,) = of_h1(answer(local=local(free=0)), Cloud(hosts=[host(SEMISHARED_BASES_FLOOR="much")]))
    assert (found.severity, found.what) == (BROKEN, f"{LOCAL} has 0 MiB free, 0 MiB are to stay free")


def test_store_that_was_never_marked_is_said_once_and_of_the_front_end() -> None:
    answers: Answers = {machine: answer(stores={STORE: state(marker="")}) for machine in ("fe", "h1")}
    assert of_machines(answers, Site("fe"), OLD_STORE, SIZES) == [
        Finding(
            WARNING,
            "fe",
            f"store {STORE} is not marked: that it is not mounted would not be noticed",
            "semishared setup --apply --image 'semi images' --system 'it'\\''s_sys'",
        )
    ]


def test_store_without_a_system_datastore_is_marked_by_its_own_name() -> None:
    answers: Answers = {"fe": answer(stores={STORE: state(marker="")})}
    about = {"ID": "100", "NAME": "semi_img", "TYPE": "0", "BASE_PATH": STORE}
    (found,) = of_machines(answers, Site("fe"), Cloud([Datastore(element("DATASTORE", about, {}))]), SIZES)
    assert found.mend == "semishared setup --apply --image semi_img"


def test_what_the_front_end_says_of_itself() -> None:
    install = "as root: ./install.sh"
    site = Site(
        "fe",
        ("oned.conf: TM_MAD",),
        "no oned.conf",
        True,
        ("new of this OpenNebula is not handed over to",),
        "unknown key",
        "refused",
    )
    assert of_site(site) == [
        Finding(BROKEN, "fe", "configuration: oned.conf: TM_MAD: missing", install),
        Finding(WARNING, "fe", "no oned.conf", "run this as oneadmin, or as root"),
        Finding(
            WARNING, "fe", "oned.conf is newer than the running oned", "as root: systemctl restart opennebula"
        ),
        Finding(
            BROKEN,
            "fe",
            "vmm/semishared: new of this OpenNebula is not handed over to",
            f"{install}; as oneadmin: onehost sync --force",
        ),
        Finding(BROKEN, "fe", "unknown key", "edit etc/semishared.conf; as oneadmin: onehost sync --force"),
        Finding(BROKEN, "fe", "refused", "as root: systemctl start opennebula"),
    ]
    assert of_site(Site("fe")) == []


def image(**template: str) -> Image:
    return Image(element("IMAGE", {"ID": "7", "NAME": "web"}, template))


@pytest.mark.parametrize(
    ("cloud", "wanted"),
    [
        (Cloud([store(), system()]), []),
        (
            Cloud(),
            [
                Finding(
                    WARNING, "fe", f"there is no {kind} datastore of semishared", "semishared setup --apply"
                )
                for kind in ("image", "system")
            ],
        ),
        (
            Cloud([store(SEMISHARED_PLACE="here"), system()]),
            [
                Finding(
                    BROKEN,
                    "fe",
                    "datastore 100 (semi images): SEMISHARED_PLACE is 'here', not one of auto, shared, local",
                    "onedatastore update 100",
                )
            ],
        ),
        (
            Cloud([store(LN_TARGET="SYSTEM"), system()]),
            [
                Finding(
                    WARNING,
                    "fe",
                    "datastore 100 (semi images): LN_TARGET is SYSTEM, oned.conf says NONE",
                    "onedatastore update 100: save it unchanged, and oned copies what oned.conf says",
                )
            ],
        ),
        (
            Cloud([store(), system()], [image(SEMISHARED_PLACE="here")]),
            [
                Finding(
                    BROKEN,
                    "fe",
                    "image 7 (web): SEMISHARED_PLACE is 'here', not one of auto, shared, local",
                    "oneimage update 7",
                )
            ],
        ),
        (
            Cloud([store(), system()], hosts=[host(SEMISHARED_BASES_LIMT="80%")]),
            [
                Finding(
                    BROKEN,
                    "h1",
                    "there is no attribute SEMISHARED_BASES_LIMT: is SEMISHARED_BASES_LIMIT meant?",
                    "onehost update h1",
                )
            ],
        ),
        (
            Cloud([store(), system()], [image(PERSISTENT_TYPE="SHAREABLE")]),
            [
                Finding(
                    WARNING,
                    "fe",
                    "image 7 (web) is SHAREABLE: the scheduler gives its VMs no system datastore "
                    "of semishared",
                    "deploy and migrate them by hand: onevm deploy VM HOST DATASTORE; onevm migrate VM HOST",
                )
            ],
        ),
    ],
)
def test_what_oned_says_and_what_mends_it(cloud: Cloud, wanted: list[Finding]) -> None:
    assert of_cloud(cloud, "fe") == wanted


@pytest.mark.fault(
    61, "doctor names the datastore for VMs that the scheduler does not place, which oned refuses without"
)
def test_shareable_image_is_deployed_into_a_system_datastore_of_its_clusters() -> None:
    def at(view: Datastore, cluster: int) -> Datastore:
        clusters = ElementTree.SubElement(view.element, "CLUSTERS")
        ElementTree.SubElement(clusters, "ID").text = str(cluster)
        return view

    def shared(number: int) -> Datastore:
        found = system()
        found.element.find("ID").text = str(number)  # type: ignore[union-attr]
        return found

    shareable = image(PERSISTENT_TYPE="SHAREABLE")
    ElementTree.SubElement(shareable.element, "DATASTORE_ID").text = "100"
    stores = [at(store(), 3), at(shared(104), 3), at(shared(102), 3), at(shared(101), 4)]
    (found,) = [one for one in of_cloud(Cloud(stores, [shareable]), "fe") if "SHAREABLE" in one.what]
    assert "onevm deploy VM HOST 102;" in found.mend


def test_store_of_two_drivers() -> None:
    about = {
        "ID": "100",
        "NAME": "img",
        "TYPE": "0",
        "TM_MAD": "semishared",
        "DS_MAD": "fs",
        "BASE_PATH": STORE,
    }
    assert of_cloud(Cloud([Datastore(element("DATASTORE", about, {})), system()]), "fe") == [
        Finding(
            BROKEN,
            "fe",
            "datastore 100 (img): TM_MAD is semishared, DS_MAD fs, not both semishared",
            "onedatastore update 100: both are semishared, or none",
        )
    ]


@pytest.mark.parametrize(
    ("hooks", "what"),
    [
        (
            [("ft/host_error.rb", "$TEMPLATE -r")],
            "OpenNebula's hook for lost hosts removes VMs, disks of semishared too",
        ),
        (
            [("ft/host_error.rb", "$TEMPLATE -m -p 5")],
            "OpenNebula's hook for lost hosts passes over all VMs of semishared",
        ),
        ([("ft/host_error.rb", "$TEMPLATE -m"), ("semishared failover", "")], ""),
        ([], ""),
    ],
)
def test_hook_for_lost_hosts(hooks: list[tuple[str, str]], what: str) -> None:
    views = [
        View(element("HOOK", {}, {"COMMAND": command, "ARGUMENTS": arguments}))
        for command, arguments in hooks
    ]
    wanted = [Finding(WARNING, "fe", what, "docs/how-to/dead-host.md")] if what else []
    assert of_cloud(Cloud([store(), system()], hooks=views), "fe") == wanted


def test_images_of_stock_drivers() -> None:
    what = "image 7 (web) has snapshots of OpenNebula's own drivers, and cannot be used"
    assert of_stock_images([image()], "fe") == [Finding(BROKEN, "fe", what, "docs/how-to/stock-images.md")]


def test_leftovers() -> None:
    what = "3 leftovers of killed actions (1.5 GiB)"
    assert of_leftovers(3, "1.5 GiB", "fe") == [
        Finding(WARNING, "fe", what, "semishared gc --dry-run; then semishared gc")
    ]
    assert of_leftovers(0, "0 B", "fe") == []


def test_machine_that_gc_cannot_search_is_said_unless_it_is_broken_anyway() -> None:
    errors = [{"machine": machine, "error": "denied"} for machine in ("h1", "h2", "h3")]
    broken = Finding(BROKEN, "h2", "its disk", "mend it")
    wanted = Finding(
        WARNING, "h1", "cannot be searched for leftovers: denied", "mend that; then semishared gc --dry-run"
    )
    assert of_unseen(errors, {"h1", "h2"}, [broken]) == [wanted]
