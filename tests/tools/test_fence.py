# SPDX-License-Identifier: Apache-2.0
"""`semishared fence` on mounted stores, and on a real Ceph cluster whose OSD shares its address with the host
that is shut out.

Whole addresses of hosts that are cut off, with guests: tests/ceph/test_fence.py. Over NFS:
tests/nfs/test_fence.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Tuple

import pytest

from lab.oned.objects import Datastore, History, Image, Vm
from semishared.cli import caps
from semishared.config import Config
from semishared.errors import CephRefused, NoKey, NotFenced, StillFenced
from semishared.front import fence_facts, front_ends, move
from semishared.front.fence import Fence, Proof
from semishared.front.fence_facts import TYPE, Marks
from semishared.model.store.access import Access
from semishared.opennebula import xml
from semishared.opennebula.oned import Oned
from semishared.plan.care import fence as plan
from semishared.plan.store.ceph_caps import fence as fence_key
from semishared.store.rbd import ceph
from semishared.store.rbd.blocklist import Fencer
from tools.oned_site import HERE, STORE, SYSTEM, ActionSite
from tools.test_writers import exported

if TYPE_CHECKING:
    from tools.ceph_site import Site

RBD = SHARES = 110
MONITORED, ERROR, OFFLINE = 2, 3, 8
"""States of a host: OpenNebula sees it, has lost sight of it, was told to look no more."""
BOOT, NEXT = "6f0c2a4e-0000-4000-8000-000000000001", "6f0c2a4e-0000-4000-8000-000000000002"
FENCER = caps.FENCE_USER
WRITER = """
import rados, rbd, sys
cluster = rados.Rados(conffile=sys.argv[1], rados_id="libvirt")
for option in ("rados_osd_op_timeout", "rados_mon_op_timeout"):
    cluster.conf_set(option, "15")
cluster.connect(timeout=15)
image = rbd.Image(cluster.open_ioctx("one"), sys.argv[2])
print("open", flush=True)
for line in sys.stdin:
    try:
        image.write(line.strip().encode() * 4096, 0)
        image.flush()
        print("written", flush=True)
    except rbd.Error as e:
        print("refused", e, flush=True)
"""


class Cloud:
    """A simulated oned that knows hosts h1 and h2 besides this machine, and what was told to their
    monitoring.
    """

    def __init__(self, site: ActionSite, config: Config) -> None:
        self.site, self.config = site, config
        site.oned.host_create("h1")
        site.oned.host("h1").state = ERROR
        self.tell("h1", "10.0.0.3")

    def tell(self, host: str, *addresses: str, boot: str = BOOT) -> None:
        """Let a host's monitoring say where it is."""
        told = f'SEMISHARED = [ HEALTH = "OK", BOOT = "{boot}", ADDRESSES = "{" ".join(addresses)}" ]'
        self.site.oned.host_update(self.site.oned.host(host).id, told)

    def runs(self, *disks: Dict[str, str], host: str = "h1") -> Vm:
        """Let a VM be on a host."""
        oned = self.site.oned
        rows = [
            {"DISK_ID": str(number), "READONLY": "NO", **self._of_image(disk)}
            for number, disk in enumerate(disks)
        ]
        vm = Vm(len(oned.vms), "vm", {"DISK": list(rows)}, {}, 3, 3)
        vm.history.append(History(0, 0, oned.host(host), "semishared", SYSTEM))
        oned.vms[vm.id] = vm
        return vm

    def _of_image(self, disk: Dict[str, str]) -> Dict[str, str]:
        """Return what a VM has of a disk, and let oned have its image, which is what counts."""
        images = self.site.oned.images
        number, store = max(images, default=0) + 1, int(disk["DATASTORE_ID"])
        images[number] = Image(
            number,
            f"image {number}",
            2,
            disk["PERSISTENT"] == "YES",
            store,
            "a store",
            {},
            source=disk["SOURCE"],
        )
        return {**disk, "IMAGE_ID": str(number)}

    def fence(self, host: str = "h1", off: bool = False, locks_s: float = 1, **settings: Any) -> Proof:
        return Fence(Oned(), self.config._replace(**settings), locks_s).fence(host, off)

    def proof(self, host: str = "h1") -> Proof:
        return Fence(Oned(), self.config).proof(host)

    def refused(self, *, check: bool = False, **words: Any) -> str:
        """Return why a host is not fenced."""
        with pytest.raises(NotFenced) as caught:
            self.proof() if check else self.fence(**words)
        return caught.value.detail

    def mark(self) -> Any:
        (host,) = [host for host in Oned().hosts() if host.name == "h1"]
        return Marks(Oned()).of(host)

    def note(self, mark: plan.Mark) -> None:
        """Have a mark of h1 that this front-end has written."""
        (host,) = [host for host in Oned().hosts() if host.name == "h1"]
        Marks(Oned()).note(host, mark)


@pytest.fixture()
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with ActionSite.up(tmp_path) as site:
        assert site.oned.rpc
        monkeypatch.setenv("ONE_XMLRPC", site.oned.rpc.url)
        monkeypatch.setenv("ONE_AUTH", str(site.auth))
        yield Cloud(site, Config())


@pytest.fixture()
def command(tmp_path: Path) -> Path:
    """A fencing command that notes its words and ends with the code that is in a file."""
    path = tmp_path / "fencing"
    path.write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$@" >>{tmp_path}/said\nexit "$(cat {tmp_path}/code '
        f'2>/dev/null || echo 0)"\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture()
def bin_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What this test has in the place of ssh; at first a host that is not there."""
    path = tmp_path / "bin/ssh"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\necho No route to host >&2; exit 255\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def said(command: Path) -> List[str]:
    path = command.parent / "said"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("ssh", "answers"),
    [
        ("exit 0", True),
        ("exit 1", True),
        ("echo ssh: connect to host h1 port 22: No route to host >&2; exit 255", False),
        ("echo 'oneadmin@h1: Permission denied (publickey).' >&2; exit 255", True),
        ("exec sleep 9", False),
    ],
)
def test_what_ssh_says_of_who_may_be_lost_is_judged(
    ssh: str, answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its exit code and its words; that ssh itself says so of a host that runs, and of one that does not:
    system/test_failover.py.
    """
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\n{ssh}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert fence_facts.answers_ssh("h1", 1 if "sleep" in ssh else 10) == answers


# -- mounted stores
# -------------------------------------------------------------------------------------------------


def test_a_host_with_a_mounted_store_is_fenced_by_nothing_but_its_being_off(
    cloud: Cloud, command: Path
) -> None:
    assert "datastore 100 (semi_img): a host writes to a mounted store until it is off" in cloud.refused()
    assert "was begun, and did not end" in cloud.refused(check=True)
    (command.parent / "code").write_text("7")
    assert "the fencing command failed" in cloud.refused(fence_command=str(command))
    assert "did not end within 1 s" in cloud.refused(
        fence_command="/bin/bash -c 'sleep 60' --", fence_timeout_s=1
    )
    (command.parent / "code").write_text("0")
    proof = cloud.fence(fence_command=f"{command} 'two words'")
    assert (proof.host, proof.epoch, proof.boot, proof.off, proof.blocked) == ("h1", 1, BOOT, "command", ())
    assert said(command) == ["h1", "two words", "h1"]
    assert cloud.fence(fence_command="/bin/false") == proof == cloud.proof(), (
        "what is proved is not done again"
    )


def test_the_operator_may_say_that_it_is_off_and_no_command_runs(cloud: Cloud, command: Path) -> None:
    assert cloud.fence(off=True, fence_command=str(command)).off == "confirmed" and not said(command)


def test_a_lock_that_is_held_forbids_and_one_that_is_gone_proves_nothing(cloud: Cloud, command: Path) -> None:
    image = cloud.site.source(cloud.site.image(persistent=True))
    cloud.runs({"DATASTORE_ID": str(STORE), "SOURCE": str(image), "PERSISTENT": "YES"})
    with exported(str(image), "raw"):
        for words in ({"off": True}, {"fence_command": str(command)}):
            assert f"{image} is written to by process" in cloud.refused(**words)
        assert cloud.mark().state == "begun"
    assert "until it is off" in cloud.refused(), "its lock is gone"
    assert cloud.fence(off=True).off == "confirmed"


def add_shares(cloud: Cloud) -> Dict[str, str]:
    """Have a datastore of shares in the place of the mounted one; return the disk that one of them is."""
    oned = cloud.site.oned
    del oned.datastores[STORE]
    template = {"DISK_TYPE": "FILESYSTEM", "SEMISHARED_FS": "btrfs", "SEMISHARED_FS_ROOT": "/srv/shares"}
    oned.datastores[SHARES] = Datastore(
        SHARES, "shares", 0, "semishared", "semishared", "/nowhere", dict(template)
    )
    return {
        "DATASTORE_ID": str(SHARES),
        "SOURCE": "/srv/shares/share-5",
        "TYPE": "FILESYSTEM",
        "PERSISTENT": "YES",
    }


@pytest.mark.parametrize("persistent", ["YES", "NO"])
def test_a_host_whose_guests_write_to_shares_is_fenced_by_nothing_but_its_being_off(
    cloud: Cloud, command: Path, persistent: str
) -> None:
    share = {**add_shares(cloud), "PERSISTENT": persistent}
    cloud.runs({**share, "READONLY": "YES"})
    cloud.runs(share, host=HERE)
    before = cloud.fence()
    assert (before.off, before.blocked) == ("", ()) and cloud.proof() == before, (
        "its guests only read, or have none"
    )
    cloud.runs(share)
    assert "datastore 110 (shares) was not there then" in cloud.refused(check=True)
    assert "datastore 110 (shares): a host writes to a mounted store until it is off" in cloud.refused()
    assert cloud.fence(fence_command=str(command)).off == "command" and said(command) == ["h1"], (
        "nobody looks for locks in a share"
    )
    assert cloud.proof().off == "command"


@pytest.mark.parametrize("lcm", [4, 60, 61])
def test_a_share_of_a_vm_that_is_on_its_way_from_the_host_counts_until_it_is_elsewhere(
    cloud: Cloud, lcm: int
) -> None:
    share = add_shares(cloud)
    cloud.fence()
    vm = cloud.runs(share)
    vm.history.append(History(1, 0, cloud.site.oned.host(HERE), "semishared", SYSTEM))
    vm.lcm = lcm
    assert "shares) was not there then" in cloud.refused(check=True)
    vm.lcm = 3
    assert cloud.proof().off == ""


def test_clones_and_snapshots_count_as_disks_too(cloud: Cloud) -> None:
    source = cloud.site.source(cloud.site.image(format="qcow2"))
    clone = source.parent / f".semishared/{source.name}/clones/0-0"
    clone.parent.mkdir(parents=True)
    cloud.runs({"DATASTORE_ID": str(STORE), "SOURCE": str(source), "PERSISTENT": "NO"})
    layer = Path(f"{clone}.snap/1")
    layer.parent.mkdir()
    clone.symlink_to("0-0.snap/1")
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(layer), "1M"], check=True)
    with exported(str(layer), "qcow2"):
        assert f"{layer} is written to" in cloud.refused(off=True)


@pytest.mark.fault(
    36,
    "whether a host was restarted since its fence is told without its front-end's clock, which "
    "may have been set since",
)
@pytest.mark.parametrize("off_s", [86400, -86400])
def test_a_clock_that_is_set_lets_nobody_in_and_keeps_nobody_out(
    cloud: Cloud, off_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.tell("h1", "10.0.0.3", boot="")
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + off_s)
        cloud.fence(off=True)
    fence = Fence(Oned(), cloud.config)
    with pytest.raises(StillFenced, match="up for 500 s"):
        fence.lift("h1", BOOT, 500)
    time.sleep(0.1)
    assert fence.lift("h1", NEXT, 0.05) == ()


@pytest.mark.fault(
    36, "a front-end that cannot know which boot is of before lets none in that it has seen, and the next one"
)
def test_another_front_end_asks_for_one_more_restart(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.tell("h1", "10.0.0.3", boot="")
    cloud.fence(off=True)
    fence = Fence(Oned(), cloud.config)
    monkeypatch.setattr("semishared.front.fence.now", lambda: "another:5.0")
    for _ in range(2):
        with pytest.raises(StillFenced):
            fence.lift("h1", NEXT, 0.1)
    assert cloud.proof().boot == ""
    assert fence.lift("h1", BOOT, 500) == ()


def test_a_host_that_is_back_needs_another_boot_and_is_fenced_anew_the_next_time(
    cloud: Cloud, command: Path
) -> None:
    first = cloud.fence(off=True)
    fence = Fence(Oned(), cloud.config)
    with pytest.raises(StillFenced, match="its boot id is the one that is shut out"):
        fence.lift("h1", BOOT, 1)
    with pytest.raises(StillFenced, match="up for 500 s"):
        fence.lift("h1", NEXT, 500)
    assert cloud.proof() == first
    cloud.tell("h1", "10.0.0.3", boot=NEXT)
    assert "before it was started the last time" in cloud.refused(check=True)
    time.sleep(1.1)
    assert fence.lift("h1", NEXT, 0.5) == () and cloud.mark().state == "lifted"
    assert fence.lift("h1", NEXT, 0.5) == (), "it is in"
    assert cloud.refused(check=True) == "h1 is not fenced"
    again = cloud.fence(fence_command=str(command))
    assert (again.epoch, again.boot) == (2, NEXT)


def test_the_command_line(cloud: Cloud) -> None:
    done = cloud.site.cli("fence", "h1", code=1)
    assert "until it is off" in done.stderr and "SS087" in done.stderr and done.stdout == ""
    answer = json.loads(cloud.site.cli("fence", "h1", "--check", "--json", code=1).stdout)
    assert (answer["host"], answer["fenced"]) == ("h1", False)
    said = cloud.site.cli("fence", "h1", "--confirmed-off").stdout
    assert said.startswith(f"h1 is shut out (fence 1, boot {BOOT}):")
    assert json.loads(cloud.site.cli("fence", "h1", "--check", "--json").stdout)["off"] == "confirmed"
    assert "no host 'h9'" in cloud.site.cli("fence", "h9", code=2).stderr
    assert "nobody can shut out himself" in cloud.site.cli("fence", os.uname().nodename, code=2).stderr
    # The name is a word of ssh, and no shell reads it.
    assert "SS010" in cloud.site.cli("fence", "h1", "--lift", code=2).stderr


@pytest.mark.fault(42, "a host that OpenNebula monitors, or that answers, is shut out only if that is said")
def test_a_host_that_lives_is_shut_out_only_if_that_is_said(cloud: Cloud, bin_ssh: Path) -> None:
    host = cloud.site.oned.host("h1")
    host.state = MONITORED
    for words in ((), ("--confirmed-off",)):
        assert (
            "h1: OpenNebula monitors it, so it is not dead"
            in cloud.site.cli("fence", "h1", *words, code=2).stderr
        )
    host.state = OFFLINE
    bin_ssh.write_text("#!/bin/sh\nexit 0\n")
    assert "h1: it answers over ssh" in cloud.site.cli("fence", "h1", "--confirmed-off", code=2).stderr
    assert cloud.mark().state == "", "nothing was begun"
    assert "is shut out" in cloud.site.cli("fence", "h1", "--confirmed-off", "--even-if-alive").stdout
    bin_ssh.write_text("#!/bin/sh\necho No route to host >&2; exit 255\n")
    assert "is shut out" in cloud.site.cli("fence", "h1", "--confirmed-off").stdout


@pytest.mark.fault(
    42,
    "who does not see all VMs, and so not all disks that a host may write to, shuts out and fails over none",
)
@pytest.mark.parametrize(
    "words", [("fence", "--confirmed-off"), ("fence", "--check"), ("failover",)], ids=" ".join
)
def test_who_does_not_see_all_vms_fences_nobody(cloud: Cloud, words: Tuple[str, ...]) -> None:
    assert cloud.site.oned.rpc
    cloud.site.oned.rpc.group = 1
    assert "does not see all VMs" in cloud.site.cli(words[0], "h1", *words[1:], code=2).stderr
    cloud.site.oned.rpc.group = 0
    assert cloud.mark().state == "", "nothing was begun"


@pytest.mark.fault(48, "what an operator saw once is looked at again before VMs are started by it")
def test_what_somebody_said_of_a_host_is_looked_at_again(cloud: Cloud, bin_ssh: Path, command: Path) -> None:
    host = cloud.site.oned.host("h1")
    proof = cloud.fence(off=True)
    assert proof == cloud.proof() and proof.by.partition("@")[2] == HERE.translate({ord("_"): None})
    host.state = MONITORED
    assert f"{proof.by} said at 2" in cloud.refused(check=True) and "OpenNebula monitors it" in cloud.refused(
        check=True
    )
    host.state = OFFLINE
    assert cloud.proof() == proof
    bin_ssh.write_text("#!/bin/sh\nexit 0\n")
    assert "it answers over ssh" in cloud.refused(check=True)
    assert "until it is off" in cloud.refused(), "failover starts nothing by it"
    done = cloud.site.cli("failover", "h1", code=2)
    assert "h1 may still write" in done.stderr and "rescheduled" not in done.stdout
    cloud.fence(fence_command=str(command))
    assert "the fencing command said" in cloud.refused(check=True), "a command that does not do what it says"
    bin_ssh.write_text("#!/bin/sh\nexit 255\n")
    host.state = MONITORED
    assert cloud.proof().off == "command", "OpenNebula sees it some minutes later"


@pytest.mark.fault(42, "a fence that was begun and shut nothing out is lifted")
def test_a_fence_that_shut_nothing_out_is_lifted_without_a_restart(cloud: Cloud, bin_ssh: Path) -> None:
    assert "until it is off" in cloud.refused() and cloud.mark().state == "begun"
    bin_ssh.write_text("#!/bin/sh\nexit 255\n")
    assert cloud.site.cli("fence", "h1", "--lift").stdout == "h1 is in again\n"
    assert (cloud.mark().state, cloud.mark().epoch) == ("lifted", 1)
    cloud.note(plan.Mark("begun", 2, BOOT, 1, "", ("f/10.0.0.3:0/0",)))
    assert "SS010" in cloud.site.cli("fence", "h1", "--lift", code=2).stderr, "it may have lost its disks"


# -- whose word a mark is
# ---------------------------------------------------------------------------------------------


@pytest.mark.fault(
    27,
    "a mark in a host's template, which its own monitoring writes, says neither that it is off "
    "nor that it was let in",
)
def test_a_host_that_prints_a_mark_of_its_own_is_not_believed(cloud: Cloud, command: Path) -> None:
    h1 = cloud.site.oned.host("h1")
    forged = (
        f'SEMISHARED_FENCED = [ STATE = "fenced", EPOCH = "1", BOOT = "{BOOT}", SINCE = "1", OFF = '
        f'"command", BLOCKED = "" ]'
    )
    cloud.site.oned.host_update(h1.id, forged)
    why = cloud.refused(check=True)
    assert (
        "in its template, as older versions wrote it and its own monitoring can" in why
        and "`semishared fence h1`" in why
    )
    asked: Any = SimpleNamespace(config=cloud.config)
    stays = "".join(
        f"<HISTORY><HID>{number}</HID><HOSTNAME>{name}</HOSTNAME></HISTORY>"
        for number, name in ((h1.id, "h1"), (99, "h2"))
    )
    left = xml.Vm.parse(f"<VM><ID>3</ID><HISTORY_RECORDS>{stays}</HISTORY_RECORDS></VM>")
    assert move._why_not_fenced(Oned(), asked, left, "h1") == why, "nor does a VM of it move"
    with pytest.raises(StillFenced, match="it says nothing.* then --lift lets it in"):
        Fence(Oned(), cloud.config).lift("h1", NEXT, 0)
    proof = cloud.fence(fence_command=str(command))
    assert proof.off == "command" and said(command) == ["h1"], "it was really switched off"
    cloud.site.oned.host_update(h1.id, forged.replace("fenced", "lifted"))
    assert cloud.proof() == proof, "nor does it lift its fence"
    h1.template.pop("SEMISHARED_FENCED")
    assert cloud.proof() == proof, "nor take the mark away"
    with pytest.raises(StillFenced, match="its boot id is the one that is shut out"):
        Fence(Oned(), cloud.config).lift("h1", BOOT, 0)


@pytest.mark.fault(
    27,
    "a mark of a fence counts by the code of the front-ends' key, over each of its words and the "
    "host that it is of",
)
def test_a_mark_with_one_word_changed_is_not_believed(cloud: Cloud) -> None:
    cloud.site.oned.host_create("h2")
    rpc = cloud.site.oned.rpc
    assert rpc
    first = cloud.fence(off=True)
    (right,) = (dict(template) for _, template in rpc.notes.values())
    mark = right[plan.ATTRIBUTE]
    assert isinstance(mark, dict) and len(mark) == 11
    for name, value in mark.items():
        changed = {"STATE": "lifted", "OFF": "command"}.get(name, f"{value}1" if value.isdigit() else "x")
        rpc.notes[0][1][plan.ATTRIBUTE] = {**mark, name: changed}
        fence = Fence(Oned(), cloud.config)
        assert (
            "no code by the key" in cloud.refused(check=True)
            if name != "HOST"
            else "is not fenced" in cloud.refused(check=True)
        )
        if name != "HOST":
            with pytest.raises(StillFenced, match="no code by the key of this front-end: it says nothing"):
                fence.lift("h1", NEXT, 0)
    # Of another host it is no mark either.
    (h2,) = [host.id for host in Oned().hosts() if host.name == "h2"]
    rpc.notes[0][1][plan.ATTRIBUTE] = {**mark, "HOST": str(h2)}
    with pytest.raises(NotFenced, match="h2's fence"):
        Fence(Oned(), cloud.config).proof("h2")
    rpc.notes[0][1][plan.ATTRIBUTE] = {**mark, "STATE": "begun"}
    # The way out; what was noted wrongly stays beside it, and counts no more.
    assert cloud.fence(off=True).epoch == 1 and cloud.proof().boot == first.boot and len(rpc.notes) == 2


@pytest.mark.fault(
    27, "documents that an OpenNebula user has made are no marks of fences, and keep nobody from reading ours"
)
def test_a_users_document_is_no_mark(cloud: Cloud) -> None:
    rpc = cloud.site.oned.rpc
    assert rpc
    template = "<SEMISHARED_FENCED><HOST>1</HOST><STATE>fenced</STATE><CODE>0</CODE></SEMISHARED_FENCED>"
    (h1,) = [host for host in Oned().hosts() if host.name == "h1"]
    row = f"<DOCUMENT><ID>0</ID><GID>1</GID><TEMPLATE>{template.replace('>1<', f'>{h1.id}<')}</TEMPLATE></DOCUMENT>"  # noqa: E501
    rpc.documents.append((TYPE, row))
    assert cloud.refused(check=True) == "h1 is not fenced" and cloud.mark() == plan.Mark()
    rpc.documents[0] = (TYPE, row.replace("<GID>1<", "<GID>0<"))
    assert "(document 0 in OpenNebula)" in cloud.refused(check=True)


@pytest.mark.fault(27, "without a good key a fence is refused before anything is done, with the way to one")
def test_without_the_key_nothing_is_begun(cloud: Cloud, command: Path, bin_ssh: Path) -> None:
    path = cloud.site.top / "semishared_key"
    right = path.read_text()
    wrong: Dict[str, Callable[[], object]] = {
        "is missing": path.unlink,
        "has mode 640": lambda: path.chmod(0o640),
        "is damaged": lambda: path.write_text(right[:-2]),
    }
    for what, harm in wrong.items():
        harm()
        with pytest.raises(NoKey, match=what):
            cloud.fence(fence_command=str(command))
        done = cloud.site.cli("fence", "h1", "--confirmed-off", code=2)
        assert what in done.stderr and "`semishared setup --key`" in done.stderr and not said(command)
        path.write_text(right)
        path.chmod(0o600)
    path.write_text(f"{'0' * 64}\n")
    cloud.fence(off=True)
    path.write_text(right)
    assert "no code by the key of this front-end" in cloud.refused(check=True), (
        "written by a front-end with another key"
    )


@pytest.mark.fault(27, "a host that prints the address of another front-end has it shut out of no cluster")
def test_the_other_front_ends_addresses_are_nobodys_to_block(cloud: Cloud) -> None:
    rpc = cloud.site.oned.rpc
    assert rpc
    servers = "".join(
        f"<SERVER><ENDPOINT>http://{name}:2633/RPC2</ENDPOINT></SERVER>"
        for name in ("127.0.0.1", "192.0.2.9", "[fd00::9]")
    )
    rpc.zones = (
        f"<ZONE><ID>0</ID><SERVER_POOL>{servers}</SERVER_POOL></ZONE><ZONE><ID>1</ID><SERVER_POOL/></ZONE>"
    )
    cloud.tell("h1", "10.0.0.3", "192.0.2.9")
    machines = fence_facts.ask(Oned(), "h1").machines()
    assert machines.own - machines.others == {"10.0.0.3"} and {"192.0.2.9", "fd00::9"} <= machines.front_end
    assert front_ends.others(Oned()) == ["192.0.2.9", "fd00::9"]
    assert "192.0.2.9" not in front_ends.addresses_but(Oned(), "192.0.2.9"), (
        "a front-end that is a host too can be shut out"
    )


def killed(at: int, words: str, tmp_path: Path) -> List[str]:
    """Do something with a Fence until the N-th point, and be killed there; return the points."""
    code = f"""
from semishared.config import Config
from semishared.front.fence import Fence
from semishared.model.store.access import Access
from semishared.opennebula.oned import Oned
Fence(Oned(), Config{words}
"""
    trace = tmp_path / f"trace{at}"
    lib = str(Path(__file__).resolve().parents[2] / "lib")
    env = {**os.environ, "PYTHONPATH": lib, "SEMISHARED_KILL_AT": str(at), "SEMISHARED_TRACE": str(trace)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False, timeout=60).returncode == -9
    return [line.split(" ", 1)[1] for line in trace.read_text().splitlines()]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_killed_anywhere_it_ends_the_same_when_it_is_repeated(
    cloud: Cloud, command: Path, at: int, tmp_path: Path
) -> None:
    names = killed(at, f'(fence_command={str(command)!r})).fence("h1")', tmp_path)
    assert names == ["mark begun", "host switched off", "mark fenced"][:at]
    if at < 3:
        assert "begun" in cloud.refused(check=True)
    assert cloud.fence(fence_command=str(command)).epoch == 1
    assert len(said(command)) == (1 if at in (1, 3) else 2)


# -- Ceph
# ------------------------------------------------------------------------------------------------------------


class Writer:
    """A client of its own process, as a guest's QEMU has one for each disk."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def write(self, letter: str) -> bool:
        """Tell whether it could write."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{letter}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().startswith("written")

    def is_shut_out(self) -> bool:
        """Tell whether it cannot write any more; an OSD learns it a moment later, at the latest from the next
        client that it hears.
        """
        deadline = time.monotonic() + 20
        while self.write("b"):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


@contextmanager
def writer(conf: str, image: str) -> Iterator[Writer]:
    argv = [sys.executable, "-c", WRITER, conf, image]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stdout.readline() == "open\n"
            yield Writer(process)
        finally:
            process.kill()


@pytest.fixture()
def pool(cloud: Cloud, site: Site) -> Iterator[Site]:
    """A datastore on the cluster, in the place of the mounted one; its OSD is where h1 is."""
    give_key(site, FENCER, *fence_key(FENCER, ["one"]).caps)
    add_pool(cloud, RBD, site.conf)
    del cloud.site.oned.datastores[STORE]
    cloud.tell("h1", "127.0.0.1")
    site.command("osd blocklist clear")  # who takes the lock of a writer that is gone puts that one on it
    try:
        yield site
    finally:
        site.command("osd blocklist clear")


def give_key(site: Site, user: str, *caps: Tuple[str, str]) -> None:
    made = site.command(
        "auth get-or-create", entity=f"client.{user}", caps=[word for cap in caps for word in cap]
    )
    (Path(site.conf).parent / f"ceph.client.{user}.keyring").write_text(
        f"[client.{user}]\n\tkey = {made[0]['key']}\n"
    )


def add_pool(cloud: Cloud, number: int, conf: str) -> None:
    template = {
        "DISK_TYPE": "RBD",
        "POOL_NAME": "one",
        "CEPH_USER": "libvirt",
        "CEPH_CONF": conf,
        "SEMISHARED_CEPH_FENCE_USER": FENCER,
    }
    oned = cloud.site.oned
    oned.datastores[number] = Datastore(
        number, f"rbd{number}", 0, "semishared", "semishared", "/nowhere", dict(template)
    )


def disk(number: int = 7, **more: str) -> Dict[str, str]:
    return {"DATASTORE_ID": str(RBD), "SOURCE": f"one/one-{number}", "PERSISTENT": "YES", **more}


def blocked(site: Site) -> Dict[str, str]:
    found: Dict[str, str] = site.command("osd dump")["blocklist"]
    return found


def test_an_image_that_goes_while_they_are_looked_into_has_nobody(pool: Site) -> None:
    for number in (7, 8):
        pool.make(number)

    class Late(Fencer):
        def see(self, pool_name: str) -> Tuple[ceph.Pool, List[str]]:
            seen = super().see(pool_name)
            pool.rbd.remove(pool.ioctx, "one-7")
            return seen

    with writer(pool.conf, "one-8"):
        names, openers = Late(pool.access, FENCER).openers("one")
    assert sorted(names) == ["one/one-7", "one/one-8"] and {opener.image for opener in openers} == {
        "one/one-8"
    }


def test_clients_are_shut_out_one_by_one_where_an_osd_has_their_address(cloud: Cloud, pool: Site) -> None:
    pool.make(7)
    pool.make(8)
    cloud.runs(disk(7))
    with writer(pool.conf, "one-7") as guest, writer(pool.conf, "one-8") as other:
        assert guest.write("a") and other.write("a")
        proof = cloud.fence()
        assert (
            proof.off == ""
            and len(proof.blocked) == 2
            and not any(word.endswith(":0/0") for word in proof.blocked)
        )
        assert guest.is_shut_out() and other.is_shut_out(), "whoever is at that address is not to write"
    pool.write("one-7", 0, b"n" * 4096)
    assert pool.read("one-7", 0, 1) == b"n", (
        "the next has the image, and another client of that address the cluster"
    )
    assert cloud.proof() == proof


def test_a_disk_whose_client_nobody_sees_is_no_proof_where_an_osd_has_the_address(
    cloud: Cloud, pool: Site, command: Path
) -> None:
    for number in (7, 8):
        pool.make(number)
    cloud.runs(disk(7), disk(8), disk(9, PERSISTENT="NO"))
    with writer(pool.conf, "one-7") as guest:
        assert guest.write("a")
        said = cloud.refused()
        assert (
            "127.0.0.1 is an OSD's address too" in said
            and "the one that has one/one-8 open is not seen" in said
        )
        assert "one-7 open" not in said and "one-9" not in said, "what is seen, and what is not there"
        assert guest.is_shut_out(), "what could be done was done"
    assert cloud.fence(fence_command=str(command)).off == "command", "a host that is off has none"


def test_watchers_that_are_gone_leave_their_locks_and_these_name_who_is_shut_out(
    cloud: Cloud, pool: Site
) -> None:
    pool.make(7)
    cloud.runs(disk(7))
    with writer(pool.conf, "one-7") as guest:
        assert guest.write("a")
        # As after 30 s without a sign of life: the OSD forgets the watch, the lock stays.
        (address,) = pool.busy()["one-7"]
        pool.command("osd blocklist", blocklistop="add", addr=address, expire=4.0)
        deadline = time.monotonic() + 30
        while pool.busy():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        proof = cloud.fence()
        assert [word.partition("/")[2] for word in proof.blocked] == [address]
        until = blocked(pool)[address]
        assert int(until[:4]) >= time.gmtime().tm_year + 9, (
            "the entry that was there already ends when it ended"
        )
        time.sleep(6)  # what was added for 4 s would have ended
        assert address in blocked(pool) and guest.is_shut_out() and cloud.proof() == proof


@pytest.mark.fault(
    36,
    "how long a blocklist shuts somebody out is told by the monitors' clock, whatever the front-end's says",
)
@pytest.mark.parametrize("years", [-20, 6])
def test_blocklist_is_judged_by_no_clock_of_ours(
    pool: Site, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    entry, now = "10.9.0.3:0/0", time.time
    monkeypatch.setattr(time, "time", lambda: now() + years * 365 * 86400)
    pool.command("osd blocklist", blocklistop="add", addr=entry, expire=3600.0)
    fencer = Fencer(Access("rbd", conf=pool.conf), FENCER)
    assert fencer.look()[0].lacks((entry,)) == (entry,), "it would end in an hour"
    assert fencer.block((entry,)).lacks((entry,)) == ()
    assert int(blocked(pool)[entry][:4]) >= time.gmtime(now()).tm_year + 9


def test_one_of_two_clusters_is_not_enough_and_is_done_all_the_same(
    cloud: Cloud, pool: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For both of them: the one that is there must answer within it.
    monkeypatch.setattr(ceph, "CONNECT_S", 5)
    monkeypatch.setitem(ceph.LIMITS, "client_mount_timeout", 5)
    pool.make(7)
    cloud.runs(disk(7))
    (tmp_path / "other.conf").write_text(
        "[global]\nfsid = 00000000-0000-4000-8000-000000000001\nmon host = v2:127.0.0.1:1/0\n"
    )
    add_pool(cloud, 111, str(tmp_path / "other.conf"))
    with writer(pool.conf, "one-7") as guest:
        assert guest.write("a")
        said = cloud.refused()
        assert "datastore 111 (rbd111)" in said and "datastore 110" not in said
        assert guest.is_shut_out() and len(blocked(pool)) == 1
        proof = cloud.fence(off=True)
        assert proof.off == "confirmed" and "datastore 111" in proof.notes[0]
    fence = Fence(Oned(), cloud.config)
    time.sleep(1.1)
    # Nothing of h1 is on the list of the cluster that nobody reaches.
    assert fence.lift("h1", NEXT, 0.1) == () and not blocked(pool)


@pytest.mark.fault(27, "an address that two hosts print keeps nobody from being shut out by its being off")
def test_a_contested_address_does_not_outweigh_that_the_host_is_off(
    cloud: Cloud, pool: Site, command: Path
) -> None:
    cloud.tell("h1", "10.0.0.3")
    cloud.site.oned.host_create("h2")
    cloud.tell("h2", "10.0.0.3", "10.0.0.4")
    assert "no address of h1 alone is known" in cloud.refused() and not blocked(pool), (
        "nobody's address is blocked"
    )
    proof = cloud.fence(fence_command=str(command))
    assert (
        proof.off == "command"
        and "no address of h1 alone" in proof.notes[0]
        and cloud.proof().off == "command"
    )
    assert cloud.fence() == cloud.proof(), "and it goes on to count"


def test_whole_addresses_and_a_list_that_somebody_clears(cloud: Cloud, pool: Site) -> None:
    cloud.tell("h1", "10.0.0.3", "fd00::3", "172.17.0.1")
    cloud.site.oned.host_create("h2")
    cloud.tell("h2", "10.0.0.4", "172.17.0.1")
    proof = cloud.fence()
    assert sorted(blocked(pool)) == ["10.0.0.3:0/0", "[fd00::3]:0/0"] and proof.off == ""
    pool.command("osd blocklist", blocklistop="rm", addr="10.0.0.3:0/0")
    assert "10.0.0.3:0/0 is not on the blocklist any more" in cloud.refused(check=True)
    cloud.tell("h1", "10.0.0.3", "fd00::3", "10.0.0.9")
    assert "10.0.0.3:0/0, 10.0.0.9 is not on the blocklist any more" in cloud.refused(check=True)
    cloud.tell("h1", "10.0.0.3", "fd00::3", "172.17.0.1")
    again = cloud.fence()
    assert again._replace(since=0) == proof._replace(since=0) and "10.0.0.3:0/0" in blocked(pool)
    fence = Fence(Oned(), cloud.config)
    time.sleep(1.1)
    with pytest.raises(StillFenced):
        fence.lift("h1", BOOT, 0.1)
    assert len(blocked(pool)) == 2
    assert fence.lift("h1", NEXT, 0.1) == () and not blocked(pool)


def test_killed_anywhere_nothing_is_left_on_the_list_that_is_not_noted(
    cloud: Cloud, pool: Site, tmp_path: Path
) -> None:
    cloud.tell("h1", "10.0.0.3", "fd00::3")
    both = ["10.0.0.3:0/0", "[fd00::3]:0/0"]
    points = [
        "mark begun",
        "address blocked",
        "address blocked",
        "mark fenced",
        "address let in",
        "address let in",
        "mark lifted",
    ]
    for at in range(1, 5):
        assert killed(at, '()).fence("h1")', tmp_path) == points[:at]
        assert set(blocked(pool)) <= set(cloud.mark().entries(pool.command("fsid")["fsid"]))
        assert cloud.fence().epoch == at and sorted(blocked(pool)) == both
        time.sleep(1.1)
        if at < 4:
            assert killed(at, f'()).lift("h1", {NEXT!r}, 0.1)', tmp_path / "..") == points[4 : 4 + at]
            assert (cloud.mark().state == "fenced") == (at < 3)
        assert Fence(Oned(), cloud.config).lift("h1", NEXT, 0.1) == ()
        assert not blocked(pool) and cloud.mark().state == "lifted"


def test_a_host_with_an_osd_and_no_client_has_nobody_to_block(cloud: Cloud, pool: Site) -> None:
    proof = cloud.fence()
    assert proof.blocked == () and cloud.proof() == proof and not blocked(pool)


def test_without_a_key_or_an_address_nothing_is_proved(cloud: Cloud, pool: Site) -> None:
    cloud.tell("h1")
    assert "no address of h1 alone is known" in cloud.refused()
    store = cloud.site.oned.datastores[RBD]
    del store.template["SEMISHARED_CEPH_FENCE_USER"]
    assert "has no SEMISHARED_CEPH_FENCE_USER (`semishared caps --role fence 110`)" in cloud.refused()
    give_key(pool, "looker", ("mon", "allow r"), ("osd", "profile rbd-read-only pool=one"))
    store.template["SEMISHARED_CEPH_FENCE_USER"] = "looker"
    cloud.tell("h1", "10.0.0.3")
    assert "access denied" in cloud.refused() and not blocked(pool), "a key that may not"
    with pytest.raises(CephRefused):
        fence_facts.try_key([Oned().datastore(RBD)])
    store.template["SEMISHARED_CEPH_FENCE_USER"] = FENCER
    fence_facts.try_key([Oned().datastore(RBD)])
    assert not blocked(pool)


def test_the_key_may_shut_out_and_look_and_nothing_else(cloud: Cloud, pool: Site) -> None:
    pool.make(7)
    words = cloud.site.cli("caps", "--role", "fence", "--pool", "one").stdout.splitlines()
    assert words[-1] == fence_key(FENCER, ["one"]).command()
    for line in ("rbd rm one/one-7", "rbd snap create one/one-7@x", "ceph auth ls", "ceph osd down 0"):
        argv = line.split()
        done = subprocess.run(
            [*argv, "--id", FENCER, "-c", pool.conf], capture_output=True, timeout=60, check=False
        )
        assert done.returncode, argv
    assert pool.names() == ["one-7"]
