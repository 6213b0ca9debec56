# SPDX-License-Identifier: Apache-2.0
"""A host that answers what it likes, against every action that a front-end leads and every verb: nothing of
others changes or is read.

The front-end's process, its stores and the host's are real; between it and one host's side stands who answers
falsely (lying_host.py). What is on Ceph is answered outright: the datastore's machine is the one that lies.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple
from unittest import mock

import pytest

from lab import forks
from lab.oned import ActionFailed
from lab.oned.objects import Datastore, Image
from semishared.cli.main import COMMANDS
from semishared.front import transfer
from semishared.front.fence_facts import Marks
from semishared.opennebula.oned import Oned
from semishared.plan.care.fence import Mark
from semishared.plan.share import shares
from semishared.plan.store import datastore
from semishared.plan.vm import hypervisor
from tools.oned_site import ROOT, STORE, SYSTEM
from tools.world import make_image
from trust import lies
from trust.lying_site import HONEST, LIAR, SECRET, LyingSite
from trust.verb import AS

A_FEW, MANY = 3, int(os.environ.get("SEMISHARED_LIES", "10"))
"""Lies of each situation in the usual run, and in that at length; there are some hundred of each,
SEMISHARED_LIES=1000 tells them all.
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


Situation = Callable[[LyingSite], Callable[[], Done]]
SITUATIONS: Dict[str, Situation] = {}
PRETENDED: Dict[str, Dict[str, Any]] = {}
"""By situation: what that host says of steps that it cannot carry out here."""


def situation(name: str, **pretended: Any) -> Callable[[Situation], Situation]:
    def add(made: Situation) -> Situation:
        SITUATIONS[name], PRETENDED[name] = made, pretended
        return made

    return add


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LyingSite]:
    with LyingSite.with_hosts(tmp_path_factory.mktemp("site") / "one") as up:
        yield up


# -- what is done ---------------------------------------------------------------------------------------


def tm(site: LyingSite, action: str, *words: object, stdin: str = "") -> Callable[[], Done]:
    def do() -> Done:
        try:
            site.tm(action, *words, stdin=stdin)
        except ActionFailed:
            pass
        call = site.oned.calls[-1]
        return Done(call.rc, call.stdout, call.stderr)

    return do


def verb(site: LyingSite, *words: str) -> Callable[[], Done]:
    def do() -> Done:
        argv = [*forks.words("trust.verb"), *words]
        done = subprocess.run(
            argv, input="", env=site.environment, capture_output=True, check=False, timeout=60
        )
        return Done(
            done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        )

    return do


def made(site: LyingSite, action: str, persistent: bool = False, **attributes: str) -> int:
    """Return a VM that is off on the host, and has a disk 0 of an image."""
    vm = site.vm(site.image(persistent=persistent, **attributes))
    site.on(vm, 8, 0)
    site.make(action, vm)
    return vm


def from_image(
    site: LyingSite, action: str, persistent: bool = False, **attributes: str
) -> Callable[[], Done]:
    image = site.image(persistent=persistent, **attributes)
    vm = site.vm(image)
    return tm(site, action, f"fe:{site.source(image)}", site.place(vm), vm, STORE)


def on_disk(site: LyingSite, action: str, vm: int, *words: object, store: int = STORE) -> Callable[[], Done]:
    return tm(site, action, site.place(vm), *words, vm, store)


def directory(site: LyingSite, vm: int, host: str = LIAR, system: int = SYSTEM) -> str:
    return f"{host}:{site.location}/{system}/{vm}"


for name, how in {
    "clone": {},
    "clone as a copy": {"SEMISHARED_LOCAL": "copy"},
    "clone over the store": {"SEMISHARED_LOCAL": "remote-first"},
    "clone on the store": {"SEMISHARED_PLACE": "shared"},
}.items():
    situation(name)(lambda site, how=how: from_image(site, "CLONE", **how))  # type: ignore[misc]
situation("ln")(lambda site: from_image(site, "LN", persistent=True))
situation("ln of a local disk")(
    lambda site: from_image(site, "LN", persistent=True, SEMISHARED_PLACE="local")
)
situation("delete")(lambda site: on_disk(site, "DELETE", made(site, "CLONE")))
situation("delete of a clone on the store")(
    lambda site: on_disk(site, "DELETE", made(site, "CLONE", SEMISHARED_PLACE="shared"))
)
situation("delete of a VM")(
    lambda site: (lambda vm: tm(site, "DELETE", directory(site, vm), vm, SYSTEM))(made(site, "CLONE"))
)
situation("resize")(lambda site: on_disk(site, "RESIZE", made(site, "CLONE"), 16))
situation("cpds")(lambda site: on_disk(site, "CPDS", made(site, "CLONE"), f"{site.store}/{'f' * 32}", -1))


@situation("mkimage")
def volatile(site: LyingSite) -> Callable[[], Done]:
    vm = site.vm(site.image())
    return tm(site, "MKIMAGE", 8, "raw", site.place(vm), vm, SYSTEM)


@situation("mkswap")
def swap(site: LyingSite) -> Callable[[], Done]:
    vm = site.vm(site.image())
    return tm(site, "MKSWAP", 8, site.place(vm, 1), vm, SYSTEM)


@situation("context")
def context(site: LyingSite) -> Callable[[], Done]:
    vm, path = site.vm(site.image()), site.top / "context.sh"
    path.write_text("X=1\n")
    return tm(site, "CONTEXT", path, site.place(vm, 1), vm, SYSTEM)


def session_ends(site: LyingSite, **attributes: str) -> Callable[[], Done]:
    vm = made(site, "LN", persistent=True, **attributes)
    return on_disk(site, "MVDS", vm, site.oned.vm(vm).disks[0]["SOURCE"])


situation("mvds")(session_ends)
situation("mvds of a local disk")(lambda site: session_ends(site, SEMISHARED_PLACE="local"))


def with_snapshots(site: LyingSite, action: str, persistent: bool = False) -> int:
    vm = made(site, action, persistent)
    for number in range(2):
        on_disk(site, "SNAP_CREATE", vm, number)()
    return vm


situation("snap_create")(lambda site: on_disk(site, "SNAP_CREATE", made(site, "CLONE"), 0))
situation("snap_create of an image")(
    lambda site: on_disk(site, "SNAP_CREATE", made(site, "LN", persistent=True), 0)
)
DESCRIBED: Dict[str, Any] = {
    "how": "overlay",
    "format": "qcow2",
    "image": None,
    "active": 0,
    "snapshots": [],
    "aliases": [],
    "target": "vda",
    "system_snapshots": 0,
    "layers": {"0": {"parent": -1, "format": "qcow2", "backing": "/b", "backing_format": "raw"}},
}
situation(
    "snap_create_live",
    DescribeDisk=DESCRIBED,
    DropStrays=None,
    AddLayer=None,
    SwitchLayer={"rest": "SUSPEND", "why": ""},
    NameLayer=None,
)(lambda site: on_disk(site, "SNAP_CREATE_LIVE", made(site, "CLONE"), 0))


def changed(site: LyingSite, action: str, how: str) -> Callable[[], Done]:
    return on_disk(site, action.upper(), with_snapshots(site, how, persistent=how == "LN"), 0)


for action in ("snap_delete", "snap_revert"):
    situation(action)(partial(changed, action=action, how="CLONE"))
    situation(f"{action} of an image")(partial(changed, action=action, how="LN"))


def moved(site: LyingSite, source: str, target: str, lcm: int) -> Callable[[], Done]:
    """Return an mv of a directory that is on the host that lies, if it comes from there; else on the
    other.
    """
    vm = made(site, "CLONE")
    if source == HONEST:
        tm(site, "MV", directory(site, vm), directory(site, vm, HONEST), vm, SYSTEM)()
    site.oned.vm(vm).state, site.oned.vm(vm).lcm = 3, lcm
    return tm(site, "MV", directory(site, vm, source), directory(site, vm, target), vm, SYSTEM)


situation("mv")(lambda site: moved(site, LIAR, HONEST, 9))
situation("mv to the host that lies")(lambda site: moved(site, HONEST, LIAR, 9))
situation("mv to the front-end")(lambda site: moved(site, LIAR, "fe", 30))


@situation("mv to another datastore")
def renamed(site: LyingSite) -> Callable[[], Done]:
    vm = made(site, "CLONE")
    return tm(site, "MV", directory(site, vm), directory(site, vm, system=103), vm, 103)


def migration(site: LyingSite, action: str, source: str, target: str) -> Callable[[], Done]:
    vm = made(site, "LN", persistent=True)
    place = f"{site.location}/{SYSTEM}/{vm}"
    if source == HONEST:
        tm(site, "MV", directory(site, vm), directory(site, vm, HONEST), vm, SYSTEM)()
    site.on(vm, 3, 4, target)
    stdin = base64.b64encode(site.oned.vm(vm).to_xml().encode()).decode()
    return tm(site, action, source, target, place, vm, SYSTEM, stdin=stdin)


NO_DOMAIN = {
    "CheckNotRunning": None,
    "ClearVm": {"kept": ""},
    "MergeDeltas": None,
    "UnmarkVm": None,
    "LookAtVm": {
        "present": True,
        "whole": True,
        "disks": 1,
        "seq": 0,
        "token": "",
        "seen": "5",
        "bytes": 5,
        "bases": [],
    },
}
for action in ("premigrate", "postmigrate", "failmigrate"):
    for name, hosts in ((action, (LIAR, HONEST)), (f"{action} to the host that lies", (HONEST, LIAR))):
        situation(name, **NO_DOMAIN)(
            lambda site, action=action, hosts=hosts: migration(site, action.upper(), *hosts)  # type: ignore[misc]
        )


def backup(site: LyingSite, action: str) -> Callable[[], Done]:
    vm = made(site, "CLONE")
    return tm(
        site, action, directory(site, vm), "0", f"one-{vm}", "-", vm, SYSTEM, stdin=site.oned.vm(vm).to_xml()
    )


for action in ("prebackup", "postbackup", "prebackup_live", "postbackup_live"):
    pretended: Dict[str, Any] = {"BackUp": None, "EndBackup": None} if "live" in action else {}
    situation(action, **pretended)(partial(backup, action=action.upper()))


REPOSITORY = 301
LISTS = """#!/bin/sh
cat > /dev/null; echo '{"0": "file://backup"}'
"""


HAS = {
    "version": 1,
    "disk": 0,
    "place": "local",
    "how": "copy",
    "format": "raw",
    "path": "/d/101/5/disk.0",
    "readonly": False,
}


@situation("restore", CheckNotRunning=None, DescribeVm={"present": True, "records": [HAS]})
def restored(site: LyingSite) -> Callable[[], Done]:
    remotes, kept = site.top / "fe/var/lib/one/remotes/datastore", site.top / "kept"
    make_image(kept, "qcow2", 8 << 20)
    for name, text in (("keeps/ls", LISTS), ("downloader.sh", f"#!/bin/sh\ncat {kept}\n")):
        (remotes / name).parent.mkdir(exist_ok=True)
        (remotes / name).write_text(text)
        (remotes / name).chmod(0o755)
    place = str(site.location / str(REPOSITORY))
    site.oned.datastores[REPOSITORY] = Datastore(
        REPOSITORY, "repository", 3, "keeps", "-", place, {"TYPE": "BACKUP_DS"}
    )
    site.oned.images[907] = Image(
        907, "backup", 6, False, REPOSITORY, "repository", {}, source="kept", format="raw", size=8, state=1
    )
    vm = made(site, "CLONE")
    do = tm(site, "RESTORE", site.place(vm).rpartition("/")[0], vm, 907, -1, -1)

    def alone() -> Done:
        # As OpenNebula starts it: the programs of backups are looked for beside the executable's own library.
        with mock.patch.object(site.oned.runner, "through", []):
            return do()

    return alone


# -- images on a store that another machine changes -----------------------------------------------------

BRIDGED = 300
DONE = (
    "CheckStore",
    "CreateImage",
    "CopyAcross",
    "CopyStored",
    "RemoveImage",
    "ForgetSnapshot",
    "RevertImage",
    "FlattenImage",
    "RemoveShare",
)
STORED = {
    **dict.fromkeys(DONE),
    "StageImage": "one/one-5.semishared-0123456789ab",
    "MeasureStore": [1 << 30, 1 << 40, 1 << 39],
    "DigestImage": ["0" * 32, 1 << 20],
    "ReceiveImage": {"generation": "0" * 32},
    "CheckWriters": [],
    "MakeShare": {"source": "/shares/share-5"},
    "FindDirectory": {"source": "/shares/five"},
    "MeasureRoot": [1 << 30, 1 << 40, 1 << 39],
}
CEPH = {
    "DISK_TYPE": "RBD",
    "CEPH_USER": "libvirt",
    "CEPH_SECRET": "0" * 8 + "-0000-4000-8000-" + "0" * 12,
    "POOL_NAME": "one",
}
SHARES = {
    "DISK_TYPE": "FILESYSTEM",
    "SEMISHARED_FS": "btrfs",
    "SEMISHARED_FS_ROOT": "/shares",
    "SEMISHARED_STORE": "0" * 32,
}


def stored(site: LyingSite, action: str, kind: Dict[str, str]) -> Callable[[], Done]:
    attributes: Dict[str, Any] = {"TYPE": "IMAGE_DS", "BRIDGE_LIST": LIAR, "SAFE_DIRS": str(site.top), **kind}
    held = Datastore(
        BRIDGED, "bridged", 0, "semishared", "semishared", str(site.location / str(BRIDGED)), attributes
    )
    path = site.top / "upload.img"
    path.write_bytes(b"u" * (1 << 20))
    image = Image(
        5,
        "five",
        2,
        True,
        BRIDGED,
        "bridged",
        {},
        path=str(path),
        source="one/one-5",
        format="raw",
        size=1,
        state=1,
    )
    if action == "clone":
        image.path = "one/one-4"
    if action.startswith("snap_"):
        image.target_snapshot = 0
    if action == "mkfs":
        image.template = {"FORMAT": "raw"}
    if kind is SHARES:
        image.type, image.path, image.source, image.fs = (
            7,
            "" if action == "mkfs" else "/shares/five",
            "/shares/share-5",
            "btrfs",
        )
    xml = f"<DS_DRIVER_ACTION_DATA>{image.to_xml()}{held.to_xml()}</DS_DRIVER_ACTION_DATA>"

    def do() -> Done:
        try:
            site.oned.drivers.datastore("semishared", action, "5", base64.b64encode(xml.encode()).decode())
        except ActionFailed:
            pass
        call = site.oned.calls[-1]
        return Done(call.rc, call.stdout, call.stderr)

    return do


for action in datastore.ACTIONS:
    situation(f"datastore/{action}", **STORED)(lambda site, action=action: stored(site, action, CEPH))  # type: ignore[misc]
for action in shares.ACTIONS:
    situation(f"datastore/{action} of a share", **STORED)(
        lambda site, action=action: stored(site, action, SHARES)  # type: ignore[misc]
    )


# -- verbs ----------------------------------------------------------------------------------------------

WORDS: Dict[str, Tuple[str, ...]] = {
    "attention": (),
    "base list": (),
    "base verify": (),
    "base evict": ("IMAGE",),
    "base prune": (),
    "commit": ("VM",),
    "doctor": ("--root", "ROOT"),
    "fence": (LIAR, "--check"),
    "fence --lift": (LIAR,),
    "gc": ("--dry-run", "--now"),
    "gc that removes": ("--now", "--yes"),
    "jobs": (),
    "metrics": (),
    "status": (),
    "publish": ("VM",),
    "pool list": (LIAR,),
    "pool drain": (LIAR, "/dev/none"),
    "stage": ("IMAGE", "--hosts", f"{LIAR},{HONEST}"),
    "detach": ("VM",),
    "cluster status": ("--vms", "VM"),
    "cluster commit": ("--vms", "VM"),
    "failover": (LIAR,),
    "plan": ("snap_create", "PLACE", "0", "VM", str(STORE)),
    "setup": (),
    "share list": (str(BRIDGED),),
    "share usage": ("905",),
    "share resize": ("905", "20G"),
    "share drop": (str(BRIDGED), "905", "--yes"),
    "share init": (str(BRIDGED),),
    "share snapshot list": ("905",),
    "share snapshot create": ("905", "two"),
    "share snapshot remove": ("905", "one", "--yes"),
    "gc of shares": ("--dry-run", "--now"),
}
NO_HOST = {
    "caps": "prints what a datastore needs",
    "explain": "prints pages of its own",
    "support-bundle": "asks by doctor, status and others, which are here",
}


LAID: Dict[str, Tuple[str, bool, Dict[str, str]]] = {
    "commit": ("LN", True, {"SEMISHARED_PLACE": "local"}),
    "cluster commit": ("LN", True, {"SEMISHARED_PLACE": "local"}),
    "detach": ("CLONE", False, {"SEMISHARED_LOCAL": "remote-first"}),
}
"""How the disk of the VM lies that a verb is about; an overlay, if nothing is said."""


SHARE = {
    "image": 905,
    "owner": 0,
    "born": 5,
    "size": 1 << 30,
    "source": "/shares/share-905",
    "used": 5,
    "snapshots": ["one"],
}
SNAPSHOT = {"made": 5, "alone": 5, "path": "/shares/.x", "in_guest": ""}
TOLD: Dict[str, Any] = {
    "ListShares": {"shares": [SHARE], "cloud": ""},
    "ListKeys": {"keys": []},
    "MarkRoot": {"marker": "0" * 32},
    "MeasureRoot": [1, 2, 3],
    "RemoveShare": {"removed": True},
    "ResizeShare": {"before": 5},
    "MakeSnapshot": {"name": "two", **SNAPSHOT},
    "RemoveSnapshot": None,
    "ListSnapshots": {"snapshots": [{"name": "one", **SNAPSHOT}]},
    "LookAtRoot": {"lacking": [], "cloud": "", "lapsed": ["", ""], "promised": [1, 2], "pools": {}},
}


def with_shares(site: LyingSite) -> None:
    attributes: Dict[str, Any] = {"TYPE": "IMAGE_DS", "BRIDGE_LIST": LIAR, **SHARES}
    place = str(site.location / str(BRIDGED))
    site.oned.datastores[BRIDGED] = Datastore(
        BRIDGED, "shares", 0, "semishared", "semishared", place, attributes
    )
    site.oned.images[905] = Image(
        905,
        "share",
        7,
        True,
        BRIDGED,
        "shares",
        {},
        source="/shares/share-905",
        format="raw",
        size=1024,
        state=1,
        regtime=5,
    )


def told(site: LyingSite, name: str) -> Callable[[], Done]:
    action, persistent, attributes = LAID.get(name, ("CLONE", False, {}))
    vm = made(site, action, persistent, **attributes)
    if name == "fence --lift":
        with mock.patch.dict(os.environ, site.environment), mock.patch("os.geteuid", lambda: AS):
            (host,) = [host for host in Oned().hosts() if host.name == LIAR]
            Marks(Oned()).note(host, Mark("fenced", 1, since=1, off="confirmed"))
    words = {
        "VM": str(vm),
        "IMAGE": site.oned.vm(vm).disks[0]["IMAGE_ID"],
        "PLACE": site.place(vm),
        "ROOT": str(site.top / "fe"),
    }
    if "share" in name:
        with_shares(site)
    return verb(
        site, *re.split(" that| of", name)[0].split(), *(words.get(word, word) for word in WORDS[name])
    )


for name in WORDS:
    situation(f"verb {name}", **(TOLD if "share" in name else {}))(lambda site, name=name: told(site, name))  # type: ignore[misc]


# -- the proofs -----------------------------------------------------------------------------------------

ARRIVAL = "tools/test_foreign_host.py::test_what_oned_has_not_given_does_not_arrive"
"""What mv and premigrate let come: records of all disks that oned has given the VM, and of no others, as oned
has given them.
"""
LOST = "unit/plan/cases/vmm_{}/disk-that-lost-its-record.json"
CHECKPOINT = (
    "test_no_checkpoint_is_read_without_the_records_of_its_disks",
    "test_a_checkpoint_opens_nothing_that_is_not_the_vm_s",
    "test_a_checkpoint_is_of_this_vm",
    "test_a_disk_of_a_checkpoint_is_opened_as_its_record_says",
)
ON_THE_HOST: Dict[str, Tuple[str, Tuple[str, ...]]] = {
    "deploy": (
        "the disks of vm.xml, which oned has just written, and of the domain",
        (ARRIVAL, LOST.format("deploy")),
    ),
    "attach_disk": ("DISK of the driver message: its number, driver and path", (LOST.format("attach_disk"),)),
    "migrate": ("the disks of the VM in the driver message", (ARRIVAL, LOST.format("migrate"))),
    "restore": (
        "the VM in the driver message, and both with the checkpoint",
        (ARRIVAL, *(f"unit/test_checkpoint.py::{name}" for name in CHECKPOINT)),
    ),
    "detach_disk": ("exempt, nothing is opened: the target that oned names leaves the domain", ()),
    "save": ("exempt, nothing is opened: who reads the checkpoint compares it (restore)", ()),
    "snapshot_create": ("exempt, nothing is opened: a record can only have it refused", ()),
    "snapshot_revert": ("exempt, nothing is opened: bitmaps leave the guest that oned names", ()),
}
"""Actions that a hypervisor carries out itself, by records that another machine may have sent: with what of
oned's those are compared at the action, and the tests of that and of their arrival. What a machine says of
disks of its own it could open without us.
"""


def test_every_action_and_every_verb_is_lied_to() -> None:
    names = {name.split()[0] for name in SITUATIONS}
    assert names - {"verb"} == set(transfer.PLANNED) | {f"datastore/{name}" for name in datastore.ACTIONS}
    assert {name.split()[1] for name in SITUATIONS if name.startswith("verb ")} | set(NO_HOST) == set(
        COMMANDS
    )


def test_what_records_are_compared_with_is_said_of_every_hypervisor_action() -> None:
    assert set(ON_THE_HOST) == set(hypervisor.PLANNERS)
    for action, (compared, tests) in ON_THE_HOST.items():
        assert bool(tests) != compared.startswith("exempt"), action
        for test in tests:
            path, _, name = test.partition("::")
            assert f"def {name}(" * bool(name) in (ROOT / "tests" / path).read_text(), (action, test)


def told_truly(site: LyingSite, name: str) -> List[Tuple[str, Any]]:
    """Have it done by a host that does not lie; return what that has answered."""
    site.honest()
    do = SITUATIONS[name](site)
    site.lying({"answers": PRETENDED[name]})
    done = do()
    assert "Traceback" not in done.err and done.code != 2 or name.startswith("verb"), done
    return site.truth()


def check(site: LyingSite, before: Dict[str, Any], lie: lies.Lie, done: Done) -> None:
    what = f"{str(lie)[:300]}: {done}"[:3000]
    after = site.of_others()
    assert {path for path in {*before, *after} if before.get(path) != after.get(path)} == set(), what
    assert SECRET not in site.heard(), what
    assert "Traceback" not in done.out + done.err, what
    assert not [c for c in done.out + done.err if not c.isprintable() and c != "\n"], what


def some(name: str, found: List[lies.Lie], count: int) -> List[lies.Lie]:
    """Return so many lies, of all kinds, for each situation from another one on."""
    first, count = sorted(SITUATIONS).index(name), min(count, len(found))
    return [found[(first + number * len(found) // count) % len(found)] for number in range(count)]


def lied_to(site: LyingSite, name: str, count: int) -> None:
    found, do = lies.all_of(site, told_truly(site, name)), None
    assert found or name in SILENT, "nobody has asked the host anything"
    for lie in some(name, found, count):
        site.honest()
        do = do or SITUATIONS[name](site)
        before = site.of_others()
        site.lying({**lie, "answers": PRETENDED[name]})
        done = do()
        check(site, before, lie, done)
        if not name.startswith("verb "):
            assert done.code in (0, 1), (lie, done)
            plain = [
                line for line in done.err.splitlines() if not line.startswith(("INFO: ", "WARN: ", "ERROR: "))
            ]
            assert len(plain) == done.code, (lie, done)
        if not done.code:
            do = None


SILENT = ("datastore/stat", "verb pool list", "verb failover", "verb fence", "verb setup")
"""Of these nothing is asked of a host that is as this one."""


@pytest.mark.fault(
    25, "whatever a host answers to an action or a verb, nothing of others is changed, read or written"
)
@pytest.mark.parametrize("name", SITUATIONS)
def test_what_a_host_answers_does_no_harm(site: LyingSite, name: str) -> None:
    lied_to(site, name, A_FEW)


@pytest.mark.long
@pytest.mark.parametrize("name", SITUATIONS)
def test_much_that_a_host_answers_does_no_harm(site: LyingSite, name: str) -> None:
    lied_to(site, name, MANY)
