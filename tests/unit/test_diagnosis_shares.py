# SPDX-License-Identifier: Apache-2.0
"""What doctor makes of what machines say of directories for guests."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from semishared.errors import BadRecord, ToolFailed
from semishared.install.preflight import knows_virtiofs
from semishared.model.share import names as share_names
from semishared.model.share.share import Tree
from semishared.model.share.steps import PoolOfShares, RootOnHost, SeenShareHost
from semishared.opennebula.xml import Datastore, Image
from semishared.plan.care.diagnosis import BROKEN, WARNING, Finding
from semishared.plan.care.diagnosis_shares import Made, of_hosts, of_roots, ways
from semishared.share import btrfs, cephfs, owners
from semishared.share.inspection import taken
from semishared.tools import files

MARKER = "0123456789abcdef" * 2
STORE = Datastore(ElementTree.fromstring("<DATASTORE><ID>110</ID><NAME>shares</NAME><TEMPLATE/></DATASTORE>"))
HERE, AWAY, HUNG = RootOnHost(True, MARKER), RootOnHost(), RootOnHost(error="hangs")
SOUND = SeenShareHost({}, "/usr/lib/qemu/virtiofsd", 1000, "", [])


def made(fs: str = "cephfs", **more: Any) -> Made:
    return Made(STORE, Tree(fs, "/srv/shares", MARKER), "h1", **more)


def said(
    fs: str, host: str, root: RootOnHost, libvirt: dict[str, Any] | None = None, **more: Any
) -> list[tuple[int, str]]:
    """Return what is found of a host that answers with this."""
    answer = SOUND._replace(roots={"/srv/shares": root}, **more)
    return [
        (item.severity, item.what)
        for item in of_hosts([made(fs)], {host: answer}, {host: {"libvirt": libvirt or {}}})
    ]


def test_where_shares_are_made() -> None:
    assert of_roots([made()], "fe") == []
    bare = Made(STORE, Tree("btrfs", "/srv/shares"), "h1")
    assert of_roots([bare], "fe") == [
        Finding(
            WARNING,
            "fe",
            "datastore 110 (shares): /srv/shares is no root of shares yet, so none can be made",
            "semishared share init 110",
        )
    ]
    (found,) = of_roots([made(has_cloud=False)], "fe")
    assert (found.severity, found.machine, found.mend) == (
        WARNING,
        "h1",
        "semishared share init 110",
    ) and "another one may" in found.what
    (found,) = of_roots([made(wrong="quotas of btrfs are off", mend="turn them on")], "fe")
    assert found == Finding(BROKEN, "h1", "datastore 110 (shares): quotas of btrfs are off", "turn them on")
    lapsed = ("the kernel does not count", "btrfs quota rescan -w /srv/shares")
    (found,) = of_roots([made("btrfs", lapsed=lapsed, promised=(3 << 30, 4 << 30))], "fe")
    assert found == Finding(
        BROKEN,
        "h1",
        "datastore 110 (shares): /srv/shares: the kernel does not count",
        "as root on h1: btrfs quota rescan -w /srv/shares",
    )
    (found,) = of_roots([made(promised=((4 << 30) + 1, 4 << 30))], "fe")
    assert found.severity == WARNING and "its shares may hold 4.0 GiB, and /srv/shares 4.0 GiB" in found.what
    assert [item.what[-9:] for item in of_roots([made("btrfs", lacking=["chown x", "rm -rf  y"])], "fe")] == [
        ": chown x",
        "rm -rf  y",
    ]


@pytest.mark.parametrize(
    ("fs", "host", "root", "what"),
    [
        ("cephfs", "h2", HERE, ""),
        ("cephfs", "h2", AWAY, "is not mounted"),
        ("cephfs", "h2", HERE._replace(marker=""), "is not mounted"),
        ("cephfs", "h2", HERE._replace(marker="f" * 32), "is the root of another datastore"),
        ("cephfs", "h2", HERE._replace(lacks=["nosuid", "nodev"]), "without nosuid and nodev"),
        ("cephfs", "h2", HUNG, "hangs"),
        ("btrfs", "h1", HERE._replace(lacks=["nodev"]), "without nodev"),
        # That it is away there is said where shares are made.
        ("btrfs", "h1", AWAY, ""),
        # A file system of one host.
        ("btrfs", "h2", AWAY, ""),
        ("btrfs", "h2", HERE._replace(marker=""), ""),
        ("btrfs", "h2", HERE._replace(lacks=["nosuid"]), "without nosuid"),
        ("btrfs", "h2", HUNG, "hangs"),
    ],
)
def test_roots_on_hosts(fs: str, host: str, root: RootOnHost, what: str) -> None:
    found = said(fs, host, root)
    assert [severity for severity, _ in found] == [BROKEN] * bool(what) and all(
        what in text for _, text in found
    )


def test_hosts_whose_guests_are_clients_themselves_need_nothing() -> None:
    for root in (AWAY, HERE, HUNG):
        lacks = SOUND._replace(roots={"/srv/shares": root}, daemon="", namespaces=0)
        answers = {host: lacks for host in ("h1", "h2")}
        assert (
            of_hosts([made(by_hosts=False)], answers, {}) == [] and len(of_hosts([made()], answers, {})) >= 1
        )


def images(*accesses: str) -> list[Image]:
    text = "<IMAGE><ID>5</ID><DATASTORE_ID>110</DATASTORE_ID><TEMPLATE>{}</TEMPLATE></IMAGE>"
    rows = [f"<SEMISHARED_SHARE_ACCESS>{word}</SEMISHARED_SHARE_ACCESS>" if word else "" for word in accesses]
    other = Image(
        ElementTree.fromstring(
            text.format("<SEMISHARED_SHARE_ACCESS>virtiofs</SEMISHARED_SHARE_ACCESS>").replace("110", "111")
        )
    )
    return [*(Image(ElementTree.fromstring(text.format(row))) for row in rows), other]


def test_which_ways_guests_have_shares() -> None:
    text = "<DATASTORE><ID>110</ID><TEMPLATE><SEMISHARED_FS>cephfs</SEMISHARED_FS>{}</TEMPLATE></DATASTORE>"
    client = Datastore(
        ElementTree.fromstring(text.format("<SEMISHARED_SHARE_ACCESS>client</SEMISHARED_SHARE_ACCESS>"))
    )
    assert ways(STORE, images("", "nfs")) == (True, False)
    assert ways(Datastore(ElementTree.fromstring(text.format(""))), images("", "client")) == (True, True)
    assert ways(client, images("", "client", "nfs")) == (False, True) and ways(
        client, images("virtiofs")
    ) == (True, True)


def test_what_the_manager_does_not_let_us_ask_for_is_none_of_sudo() -> None:
    tree = Tree("cephfs", "/srv/shares", MARKER, "cephfs/one", "shares")
    (found,) = of_roots([Made(STORE, tree, "h1", ["fs subvolume evict"])], "fe")
    assert found.severity == BROKEN and found.what.endswith(
        ": Ceph's manager does not let client.shares ask for: fs subvolume evict"
    )


def test_pools_that_clients_write_to() -> None:
    text = "<IMAGE><ID>{}</ID><UID>{}</UID><DATASTORE_ID>110</DATASTORE_ID><TEMPLATE>{}</TEMPLATE></IMAGE>"
    client = "<SEMISHARED_SHARE_ACCESS>client</SEMISHARED_SHARE_ACCESS>"
    known = [
        Image(ElementTree.fromstring(text.format(*row)))
        for row in ((5, 2, client), (6, 2, ""), (7, 3, ""), (8, 3, client))
    ]
    offers = (
        "<DATASTORE><ID>111</ID><TEMPLATE><SEMISHARED_FS_POOLS>x "
        "{}</SEMISHARED_FS_POOLS></TEMPLATE></DATASTORE>"
    )

    def rows(pools: str = "", **more: Any) -> list[str]:
        one = made(images=known, pools={"a": PoolOfShares([5, 6], [], [])._replace(**more)})
        other = Made(
            Datastore(ElementTree.fromstring(offers.format(pools))),
            Tree("cephfs", "/srv/other", MARKER),
            "h1",
        )
        found = of_roots([one, other], "fe")
        assert all(
            (item.severity, item.machine) == (WARNING, "h1") and "means harm" in item.mend for item in found
        )
        return [
            item.what.partition("guests write to pool a themselves, and it ")[2].partition(":")[0]
            for item in found
        ]

    assert rows() == rows(images=[6, 7], lacks=["max_bytes"], beside=["rbd"]) == rows("no!") == []
    assert rows(lacks=["max_objects"]) == ["has no quota (max_objects)"]
    assert rows("a", images=[6, 7, 8], beside=["rbd"]) == [
        "is not one tenant's alone (rbd; datastore 111; users 2, 3 of OpenNebula)"
    ]


def test_a_root_whose_users_ceph_fuse_judges_itself_is_less() -> None:
    ((severity, what),) = said("cephfs", "h2", HERE._replace(judged_by_user=True))
    assert severity == WARNING and "without fuse_default_permissions" in what


def test_what_else_a_host_needs_that_has_a_root() -> None:
    lacks: dict[str, Any] = {
        "daemon": "",
        "namespaces": 0,
        "taken": [("/etc/subgid", "admin", 165536, 231071)],
    }
    libvirt = {"virtiofs": False, "confines": ["apparmor"]}
    found = said("cephfs", "h2", HERE, libvirt, **lacks)
    assert [severity for severity, _ in found] == [BROKEN, BROKEN, WARNING, BROKEN, BROKEN]
    assert "165536 to 231071 to admin, and they are users of guests, of user 1 " in found[2][1]
    # One without any root is asked for nothing.
    assert said("btrfs", "h2", AWAY, libvirt, **lacks) == []
    profile = "  /var/tmp/one/vmm/semishared/virtiofsd{,_read_only} PUx,\n"
    assert said("cephfs", "h2", HERE, {"virtiofs": True, "confines": ["apparmor"]}, profile=profile) == []
    assert said("cephfs", "h2", HERE, {"virtiofs": None}) == []


def test_whose_users_are_guests_too() -> None:
    text = "a:100000:65536\nb:34464:65536\nc:99999:2\nd:2147452576:65536\n# x\ne:1\nf::\ng:200000:0\n"
    assert taken("/etc/subuid", text) == [
        ("/etc/subuid", "a", 100000, 165535),
        ("/etc/subuid", "c", 99999, 100000),
    ]


DOMAIN = "<domainCapabilities><devices>{}<tpm supported='no'/></devices></domainCapabilities>"
ENUM = "<filesystem supported='yes'><enum name='driverType'><value>path</value>{}</enum></filesystem>"


def test_what_libvirt_says_of_virtiofs() -> None:
    assert knows_virtiofs((0, DOMAIN.format(ENUM.format("<value>virtiofs</value>")))) is True
    assert knows_virtiofs((0, DOMAIN.format(ENUM.format("")))) is False
    assert knows_virtiofs((0, DOMAIN.format("<filesystem supported='no'/>"))) is False
    assert knows_virtiofs((0, DOMAIN.format(""))) is None and knows_virtiofs((1, "error: no")) is None


def test_what_the_programs_say_of_a_snapshot() -> None:
    text = "snapshot-7-a\n\tCreation time: \t\t2026-11-23 15:48:27 +0000\n\tQuota group:\t\t0/257\n{}"
    assert btrfs.parse_snapshot(text.format("\t  Usage exclusive:\t16384\n")) == (1795448907, 16384)
    assert btrfs.parse_snapshot(text.format("")) == (1795448907, -1)
    with pytest.raises(ToolFailed):
        btrfs.parse_snapshot("ERROR: not a subvolume")
    assert (cephfs.parse_time("2026-11-23 15:48:27.012345"), cephfs.parse_time("yesterday")) == (
        1795448907,
        -1,
    )


def test_what_in_a_root_is_a_snapshot() -> None:
    assert share_names.snapshot_of(7, "snapshot-7-a.b-c") == "a.b-c"
    for entry in (
        "snapshot-77-a",
        "snapshot-7-",
        "snapshot-7-_a",
        "snapshot-7-a b",
        "share-7",
        "snapshot-7-a\n",
        "snapshot-7-..",
    ):
        assert share_names.snapshot_of(7, entry) == "", entry


def test_ranges_of_users_with_gaps_are_an_error_and_no_waiting_for_ever(tmp_path: Any) -> None:
    ranges = tmp_path / share_names.UIDS
    ranges.mkdir(parents=True)
    for number, owner in ((1, 5), (2, 6)):
        files.write_json(str(ranges / str(number)), {"version": 1, "owner": owner})
    with pytest.raises(BadRecord, match="with gaps"):
        owners.first_uid_of(str(tmp_path), 9)
