# SPDX-License-Identifier: Apache-2.0
"""Every row of doctor's table has facts with which it finds something, and others with which it does not."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from semishared.front.stock_conf import Doubts
from semishared.model.share.share import Tree
from semishared.model.share.steps import PoolOfShares, RootOnHost, SeenShareHost
from semishared.opennebula.xml import Datastore, Host, Image, View
from semishared.plan.care import checks
from semishared.plan.care.diagnosis import (
    BULK,
    CLOUD,
    FENCE,
    LOST,
    POOL,
    SITE,
    Cloud,
    Fenced,
    Hooks,
    Lost,
    Moves,
    OwnKey,
    Published,
    Site,
    of_hooks,
    of_published,
)
from semishared.plan.care.diagnosis_front_ends import CONF, FRONT_END, FrontEnd
from semishared.plan.care.diagnosis_machines import LOCAL, MACHINE, MOUNTED, SIGNED, Machine, Room, Store
from semishared.plan.care.diagnosis_scheduler import SCHEDULER, Sent
from semishared.plan.care.diagnosis_shares import HOST, ROOT, Made, Seen, ShareHost
from semishared.plan.care.fence import BEGUN, Mark
from semishared.plan.device.choose import KINDS, Wrong

JUDGES = {
    **SITE,
    **BULK,
    **CLOUD,
    **FENCE,
    **POOL,
    **MACHINE,
    **MOUNTED,
    **LOCAL,
    **SIGNED,
    **ROOT,
    **HOST,
    **SCHEDULER,
    **LOST,
    **FRONT_END,
}
TREE: Any = {"tree": {"parts": {"lib/semishared": "a", CONF: "c"}}}
"""What another front-end says of its package."""


def xml(kind: str, text: str) -> Any:
    made = {"DATASTORE": Datastore, "IMAGE": Image, "HOST": Host, "HOOK": View}[kind]
    return made(ElementTree.fromstring(f"<{kind}>{text}</{kind}>"))


def store(drivers: str = "semishared", more: str = "", type: int = 0) -> Datastore:
    said = f"<ID>1</ID><NAME>d</NAME><TYPE>{type}</TYPE><TM_MAD>{drivers}</TM_MAD><DS_MAD>semishared</DS_MAD>"
    found: Datastore = xml("DATASTORE", f"{said}<TEMPLATE>{more}</TEMPLATE>")
    return found


def sent(compatible: str = "", images: str = "<ID>7</ID>", clusters: str = "<ID>0</ID>") -> Sent:
    """Return a stock image datastore beside our system datastore 101 and its own 102."""
    head = f"<ID>1</ID><TYPE>0</TYPE><TM_MAD>qcow2</TM_MAD><CLUSTERS>{clusters}</CLUSTERS>"
    word = f"<COMPATIBLE_SYS_DS>{compatible}</COMPATIBLE_SYS_DS>"
    return Sent(
        xml("DATASTORE", f"{head}<IMAGES>{images}</IMAGES><TEMPLATE>{word}</TEMPLATE>"),
        [
            xml(
                "DATASTORE",
                f"<ID>{number}</ID><NAME>{driver}</NAME><TYPE>1</TYPE><TM_MAD>{driver}</TM_MAD>"
                "<CLUSTERS><ID>0</ID></CLUSTERS><TEMPLATE/>",
            )
            for number, driver in ((101, "semishared"), (102, "qcow2"))
        ],
    )


def late(compatible: str) -> Sent:
    """Return the stock system datastore 102, and whom the stock image datastore names."""
    stock = sent(compatible)
    return Sent(stock.datastores[1], [*stock.datastores, stock.store])


def own(compatible: str) -> Sent:
    """Return the same of our image datastore."""
    found = sent(compatible)
    found.store.element.find("TM_MAD").text = "semishared"  # type: ignore[union-attr]
    return found


def image(more: str = "") -> Image:
    found: Image = xml("IMAGE", f"<ID>7</ID><NAME>i</NAME><UID>2</UID><TEMPLATE>{more}</TEMPLATE>")
    return found


def hook(arguments: str) -> View:
    found: View = xml(
        "HOOK",
        f"<TEMPLATE><COMMAND>ft/host_error.rb</COMMAND><ARGUMENTS>{arguments}</ARGUMENTS></TEMPLATE>",
    )
    return found


def ours(words: str) -> View:
    command = f"<TEMPLATE><COMMAND>/remotes/lib/semishared/semishared {words}</COMMAND></TEMPLATE>"
    found: View = xml("HOOK", f"<ID>4</ID><NAME>h</NAME>{command}")
    return found


def machine(**more: Any) -> Machine:
    tree = {"version": "x", "parts": {"lib/semishared": "a"}}
    sound = {
        "python": [3, 11],
        "lacks": {"needed": [], "wanted": []},
        "programs": {},
        "user": "u",
        "tree": tree,
    }
    return Machine({**sound, "libvirt": {"secrets": ["s"]}, **more}, sound, ["s"])


def seen(**more: Any) -> Store:
    state = {"empty": False, "same": True, "writable": True, "marker": "m", "passable": True}
    return Store({**state, **more}, "m")


def mount(options: str = "vers=4.2,lookupcache=pos,hard", type: str = "nfs4") -> dict[str, Any]:
    return {"type": type, "options": options.split(",")}


def room(floor: int = 1, **more: Any) -> Room:
    sound = {"free": 2, "total": 9, "inodes": 1, "no_inodes": False, "writable": True, "read_only": False}
    return Room({**sound, **more}, floor)


def made(fs: str = "btrfs", marker: str = "m", **more: Any) -> Made:
    return Made(store(), Tree(fs, "/srv", marker), "h1", **more)


def root(host: str = "h2", **more: Any) -> Seen:
    return Seen(RootOnHost(True, "m")._replace(**more), made(), host)


def share_host(libvirt: Any = (), **more: Any) -> ShareHost:
    return ShareHost(SeenShareHost({}, "d", 1, "", [])._replace(**more), dict(libvirt))


MOVES = {"DS_MIGRATE": "YES", "DS_LIVE_MIGRATE": "YES", "DS_MIGRATE_SNAP": "YES"}
NO_LIVE = "<DS_MIGRATE>YES</DS_MIGRATE><DS_LIVE_MIGRATE>NO</DS_LIVE_MIGRATE>"
BAD = "<SEMISHARED_PLACE>moon</SEMISHARED_PLACE>"
WRONG_HOST = "<SEMISHARED_BASES_LIMIT>much</SEMISHARED_BASES_LIMIT>"
SHAREABLE = "<PERSISTENT_TYPE>SHAREABLE</PERSISTENT_TYPE>"
HALF = Mark(state=BEGUN, blocked=("c/10.0.0.1",))
OLD = {"secrets": ["s"], "libvirt": "6.9.0", "qemu": "5.1.0"}
OLDEST = {"secrets": ["s"], "libvirt": "7.0.0", "qemu": "5.2.0"}
"""What libvirt says of itself and of its QEMU where both are too old, and where neither is."""
CONFINED = {"confines": ["apparmor", "selinux"]}
NO_TREE = {"version": "x", "parts": {"lib/semishared": ""}}
SIGNED_BY_M = {"signed": {"/p": {"machine": "m", "count": 4, "place": "/p"}}}
KEYS = {"one": PoolOfShares([7], ["max_bytes"], [])}
CLIENT = image("<SEMISHARED_SHARE_ACCESS>client</SEMISHARED_SHARE_ACCESS>")
WRITES = made("cephfs", pools=KEYS)._replace(store=store(more="<SEMISHARED_FS>cephfs</SEMISHARED_FS>"))


def runs(*has: str) -> dict[str, Any]:
    """Return what a host says that has these things in its processor, and one guest that sees them."""
    return {"processor": {"kind": "v 6 85", "name": "P", "has": has, "kernel": "6.1"}, "passed_through": 1}


CASES: dict[str, tuple[Any, Any]] = {
    # row: what it finds something in, and what not
    "installed": (Site("fe", ("a line",)), Site("fe")),
    "readable": (Site("fe", unreadable="why"), Site("fe")),
    "restarted": (Site("fe", restart_due=True), Site("fe")),
    "forwarders": (Site("fe", forwarders=("one",)), Site("fe")),
    "conf": (Site("fe", conf="why"), Site("fe")),
    "hostname": (Site("fe", lost_name="a"), Site("fe")),
    "oned": (Site("fe", oned="why"), Site("fe")),
    "datastores": (Cloud([store()]), Cloud([store(), store(type=1)])),
    "datastore-attributes": (store(more=BAD), store()),
    "drivers": (store("qcow2"), store()),
    "ds-moves": (Moves(store(more=NO_LIVE, type=1), MOVES), Moves(store(more=NO_LIVE), MOVES)),
    "lost-store": (Lost(frozenset({"POOL_NAME", "DRIVER"})), Lost(frozenset({"DRIVER"}))),
    "lost-words": (Lost(frozenset({"DISK_TYPE"})), Lost(frozenset())),
    "tm-conf": (store(more="<CLONE_TARGET>SELF</CLONE_TARGET>"), store()),
    "image-attributes": (image(BAD), image()),
    "host-attributes": (xml("HOST", f"<TEMPLATE>{WRONG_HOST}</TEMPLATE>"), xml("HOST", "<TEMPLATE/>")),
    "host-error": ([hook("-m -p 5")], []),
    "hook-manager": (Hooks([ours("stage --due")], False), Hooks([ours("stage --due")], True)),
    "timer-started": (Published("t", True, True, []), Published("t", True, False, [])),
    "timer-runs": (Published("t", False, False, [1.0]), Published("t", False, False, [])),
    "shareable": (image(SHAREABLE), image()),
    "sent-astray": (sent(), sent("102")),
    "sent-nowhere": (own("102"), own("101,102")),
    "sent-later": (sent(images=""), sent()),
    "unreached": (late("101"), late("101,102")),
    "stock-images": ([image()], []),
    "stock-conf-refused": (Doubts(("why",), ()), Doubts((), ())),
    "stock-conf-vain": (Doubts((), ("why",)), Doubts((), ())),
    "leftovers": ((1, "1 B"), (0, "")),
    "damaged": ([("h1", "why")], []),
    "unseen": ([{"machine": "h1", "error": "why"}], []),
    "mark": (Fenced(Mark(strange="why")), Fenced(Mark())),
    "fence-unproved": (Fenced(HALF), Fenced(HALF, "b")),
    "fence-void": (Fenced(Mark(state=BEGUN)), Fenced(HALF)),
    "fenced-runs": (Fenced(Mark(boot="b"), "b"), Fenced(Mark(boot="b"), "c")),
    "fenced-back": (Fenced(Mark(boot="b"), "c"), Fenced(Mark(boot="b"))),
    "bulk": ("why", ""),
    "fence-command": ("why", ""),
    "fence-key": ("why", ""),
    "key-said": (OwnKey("why"), OwnKey({})),
    "key-there": (OwnKey({"why_not": "is missing"}), OwnKey({"code": "c"})),
    "key-same": (OwnKey({"code": "a"}, "b"), OwnKey({"code": "b"}, "b")),
    "key-place": (OwnKey({"on": "nfs4"}), OwnKey({"on": "ext4"})),
    "front-end-says": (FrontEnd("refused"), FrontEnd({})),
    "front-end-package": (FrontEnd(TREE, {"lib/semishared": "b"}), FrontEnd(TREE, TREE["tree"]["parts"])),
    "front-end-conf": (FrontEnd(TREE, {CONF: "d"}), FrontEnd(TREE, {"lib/semishared": "b"})),
    "front-end-apart": (FrontEnd({}, apart=("/var/lib/one/datastores/101",)), FrontEnd({})),
    **{f"pool-{kind}": (Wrong(kind, "why"), Wrong("another", "why")) for kind in KINDS},
    "answers": ("refused", {}),
    "python": (machine(python=[3, 8, 1]), machine()),
    "needed": (machine(lacks={"needed": ["tar"], "wanted": []}), machine()),
    "wanted": (machine(lacks={"needed": [], "wanted": ["lzop"]}), machine()),
    "qemu": (machine(programs={"qemu-img": "4.2"}), machine(programs={"qemu-img": "7.2"})),
    "user": (machine(user="root"), machine()),
    "package": (machine(tree=NO_TREE), machine()),
    "version": (machine(tree={**NO_TREE, "version": "y"}), machine()),
    "synced": (machine(tree={"version": "x", "parts": {"lib/semishared": "b"}}), machine()),
    "libvirt": (machine(libvirt={"error": "why"}), machine()),
    "libvirt-old": (machine(libvirt=OLD), machine(libvirt=OLDEST)),
    "emulator-old": (machine(libvirt=OLD), machine(libvirt=OLDEST)),
    "emulator-user": (machine(libvirt={"user": "qemu"}), machine(libvirt={"user": "u"})),
    "secrets": (machine(libvirt={"secrets": []}), machine()),
    "selinux": (machine(libvirt={"secrets": [], **CONFINED}), machine()),
    "store-answers": (seen(error="hangs"), seen()),
    "store-same": (seen(same=False), seen()),
    "store-marker": (seen(marker=""), seen()),
    "store-own": (seen(marker="n"), seen()),
    "store-writable": (seen(writable=False), seen()),
    "marked": (seen()._replace(wanted="", is_front_end=True), seen()._replace(is_front_end=True)),
    "apparmor": (seen(mount=mount(), passable=False)._replace(libvirt=CONFINED), seen(mount=mount())),
    "nfs-version": (mount("vers=3", "nfs"), mount()),
    "nfs-locks": (mount("nolock"), mount()),
    "nfs-hard": (mount("soft"), mount()),
    "nfs-answers": (mount("softreval"), mount()),
    "nfs-lookups": (mount("vers=4.2"), mount()),
    "ceph-pool": ({"error": "why"}, {"error": ""}),
    "local-answers": (Room({"error": "why"}), room()),
    "local-read-only": (room(read_only=True), room()),
    "local-writable": (room(writable=False), room()),
    "local-full": (room(free=0), room()),
    "local-floor": (room(floor=3), room()),
    "local-inodes": (room(inodes=0), room(inodes=0, no_inodes=True)),
    "one-machine": ({"a": SIGNED_BY_M, "b": SIGNED_BY_M}, {"a": SIGNED_BY_M}),
    "qemu-mixed": ({(7, 2): ["a"], (10, 0): ["b"]}, {(7, 2): ["a", "b"]}),
    "cpu-passthrough": (
        {"a": runs("x"), "b": {**runs("y"), "passed_through": 0}},
        {"a": runs("x"), "b": runs("x"), "c": {"error": "why"}},
    ),
    "own-disk": ([{"machine": "a", "place": "/p", "names": "a, b", "directories": "/p"}], []),
    "root-marked": (made(marker=""), made()),
    "root-answers": (made(wrong="why", mend="how"), made()),
    "root-cloud": (made(has_cloud=False), made()),
    "root-quotas": (made(lapsed=("why", "how")), made()),
    "root-promised": (made(promised=(2, 1)), made(promised=(1, 2))),
    "root-sudo": (made(lacking=["chown"]), made("cephfs", lacking=["evict"])),
    "root-sudo-old": (made(sudo="1.9.9"), made(sudo="1.9.10")),
    "root-manager": (made("cephfs", lacking=["evict"]), made(lacking=["chown"])),
    "root-bounds": (WRITES._replace(images=[CLIENT]), WRITES._replace(images=[image()])),
    "share-answers": (root(error="hangs"), root()),
    "share-mounted": (root(marker=""), root("h1", marker="")),
    "share-own": (root(marker="n"), root()),
    "share-options": (root(lacks=["nosuid"]), root()),
    "share-chown": (root(judged_by_user=True), root()),
    "virtiofsd": (share_host(daemon=""), share_host()),
    "namespaces": (share_host(namespaces=0), share_host()),
    "ids-free": (share_host(taken=[("/etc/subuid", "lxd", 5, 9)]), share_host()),
    "qemu-virtiofs": (share_host({"virtiofs": False}), share_host({"virtiofs": True})),
    "wrapper": (share_host(CONFINED), share_host()),
}
ROWS = {check.name: of for of, checks_of in checks.CHECKS.items() for check in checks_of}


def test_every_row_has_a_name_a_question_a_judge_and_a_case() -> None:
    rows = [check for checks_of in checks.CHECKS.values() for check in checks_of]
    assert set(ROWS) == set(JUDGES) == set(CASES) and len(ROWS) == len(rows)
    assert all(check.question.endswith("?") and check.what and check.mend for check in rows)


@pytest.mark.parametrize("name", CASES)
def test_row_finds_what_is_wrong_and_nothing_where_all_is_well(name: str) -> None:
    failing, passing = CASES[name]
    (row,) = [check for check in checks.CHECKS[ROWS[name]] if check.name == name]
    assert JUDGES[name](failing), f"{row.question} Yes, though it is not so"
    assert not JUDGES[name](passing), f"{row.question} No, though it is so"


@pytest.mark.fault(
    60, "doctor says when OpenNebula's hook manager does not run, and a hook of ours waits for it"
)
def test_hooks_of_others_are_not_looked_for() -> None:
    assert not of_hooks([hook("-m -p 5")], False, "fe") and not of_hooks([], False, "fe")
    (found,) = of_hooks([ours("failover --hook"), hook("-m"), ours("stage --due")], False, "fe")
    assert found.what.endswith("does not run: it would start h, h") and "opennebula-hem" in found.mend


@pytest.mark.fault(
    66, "doctor says that nothing publishes, or that the timer was stopped, and how to have it"
)
@pytest.mark.parametrize(
    ("published", "said", "mend"),
    [
        (
            Published("t", False, False, [1900.0, 7260.0]),
            "of 2 VMs as they were, for up to 121 minutes",
            "--detach-timer",
        ),
        (Published("t", True, False, [1900.0]), "does not run, or fails", "journalctl -u t,"),
        (
            Published("t", True, True, [1900.0]),
            "systemd has not started it",
            "systemctl enable --now t.timer",
        ),
    ],
)
def test_timer_that_publishes_is_missed(published: Published, said: str, mend: str) -> None:
    (found,) = of_published(published, "fe")
    assert (found.severity, found.machine) == (checks.WARNING, "fe")
    assert said in found.what and mend in found.mend


@pytest.mark.fault(61, "doctor says when an upgrade of OpenNebula has left datastores that refuse moves")
def test_what_differs_from_oned_conf_of_moves_is_said_with_what_it_decides() -> None:
    (found,) = Moves(store(more=NO_LIVE, type=1), MOVES).differing()
    assert found == {
        "key": "DS_LIVE_MIGRATE",
        "there": "NO",
        "wanted": "YES",
        "what": "moves to it of VMs that run",
    }
    # An administrator's own choice in oned.conf, one that is not readable, and an oned that has none of it.
    assert Moves(store(more=NO_LIVE, type=1), {**MOVES, "DS_LIVE_MIGRATE": "NO"}).differing() == []
    assert Moves(store(more=NO_LIVE, type=1), {}).differing() == Moves(store(type=1), MOVES).differing() == []
