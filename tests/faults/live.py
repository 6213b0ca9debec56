# SPDX-License-Identifier: Apache-2.0
"""A running domain with a disk of each kind, for the kill suite: saved, killed and started again within a
second.

It has nothing to boot: no guest writes, so that what every disk must hold is known, and a domain costs 0.3 s.
Its QEMU, libvirt and disks are real. Guests that write and verify are in tests/system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple
from xml.etree import ElementTree

import pytest

from lab import NodeProcess, domains, fork_server, layout
from rot import copied
from semishared.config import Config
from semishared.errors import SemisharedError
from semishared.model import steps as s
from semishared.model.device.steps import SetDevices
from semishared.opennebula import args
from semishared.plan.disk import snapshots
from semishared.tools import layers
from semishared.wire import messages
from semishared.wire import session as ssh

from . import libvirt_proxy
from .cloud import STORE, SYSTEM, Cloud, until
from .rig import MARK, digest, file_digest, image_bytes

VM = 7
DOMAIN = f"one-{VM}"
VM_DIR = f"{SYSTEM}/{VM}"
SAVED = f"{STORE}/saved"
BACKUP = f"{VM_DIR}/backup"
BASE_STORE = "/var/lib/one/datastores/.semishared"
OVERLAY, COPY, ON_STORE, IN_PLACE = range(4)
PLACES = ("overlay", "copy", "store-clone", "in-place")
CONTENT = image_bytes("live")
MiB = 1 << 20
VIRSH = ["virsh", "-q", "-c", "qemu:///system"]
RUNNING, NO_JOB, HMP = 1, 0, 1  # VIR_DOMAIN_RUNNING, VIR_DOMAIN_JOB_NONE, VIR_DOMAIN_QEMU_MONITOR_COMMAND_HMP
KVMRC = "/var/tmp/one/etc/vmm/kvm/kvmrc"
PROXY = "/var/tmp/libvirt-proxy"
TRACE = "/var/tmp/trace"
Environment = Dict[str, str]


def written(*marks: int) -> bytes:
    """Return the image after writes: mark N is 512 KiB of byte N at N MiB."""
    changed = bytearray(CONTENT)
    for mark in marks:
        changed[mark * MiB : mark * MiB + MiB // 2] = bytes([mark]) * (MiB // 2)
    return bytes(changed)


LEAKS = 3
"""Exit code of `qemu-img check` for leaks alone (qemu-img(1))."""


class Live:
    """VM 7 on h1: disk 0 an overlay, 1 a copy, 2 a clone on the store, 3 in place."""

    def __init__(
        self, cloud: Cloud, attributes: Optional[Dict[int, str]] = None, devices: Sequence[str] = ()
    ) -> None:
        """`devices`: where the devices of the host's pool are mounted, if it is to have one."""
        self.cloud, self.host, self._devices = cloud, cloud.h1, tuple(devices)
        self.top = Path(tempfile.mkdtemp(prefix="semishared-live-"))
        self.environment = self.host._command([], "oneadmin", None, "/")[1]
        self._read: Dict[Tuple[str, ...], str] = {}
        self._checked: Set[str] = set()
        self._may_leak = False
        # We are its front-end, from the checkout; what is installed there is made of the same.
        ssh.RELEASE = messages.release(str(self.host.path("/var/tmp/one/lib/semishared")))  # type: ignore[attr-defined] # what it has imported
        self._server, self._machine = self._power_on()
        if devices:
            self.run({}, SetDevices(BASE_STORE, self._devices))
        for number, extra in enumerate(
            ("", "<SEMISHARED_LOCAL>copy</SEMISHARED_LOCAL>", "<SEMISHARED_PLACE>shared</SEMISHARED_PLACE>")
        ):
            cloud.image(number + 1, attributes=(attributes or {}).get(number, extra))
        cloud.image(4, persistent=True, attributes=(attributes or {}).get(IN_PLACE, ""))
        cloud.vm(VM, {0: 1, 1: 2, 2: 3, 3: 4})
        source, self.mine = cloud.upload(CONTENT), cloud.upload(CONTENT)
        self._source = source
        for disk in range(4):
            words = [
                f"fe:{self.mine if disk == IN_PLACE else source}",
                f"h1:{VM_DIR}/disk.{disk}",
                str(VM),
                "100",
            ]
            done = cloud.tm("ln" if disk == IN_PLACE else "clone", *words)
            assert done.returncode == 0, done.stderr.decode()
        self.save("new")

    def image_of(self, disk: int) -> str:
        """Return the image on the store that a disk was made from."""
        return self.mine if disk == IN_PLACE else self._source

    def close(self) -> None:
        self.end_domain()
        self._server.close()
        self._machine.wait()
        shutil.rmtree(self.top)

    def _power_on(self) -> Tuple[socket.socket, NodeProcess]:
        """Start what starts host sides on h1, as the driver's user there."""
        self.host.path("/var/tmp/fork_server.py").write_text(Path(fork_server.__file__).read_text())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = self.host.popen(
            ["/usr/bin/python3", "-I", "/var/tmp/fork_server.py", "/var/tmp/one/lib"], stdin=theirs
        )
        theirs.close()
        assert ours.recv(100) == b"ready"
        return ours, process

    # -- its host side ----------------------------------------------------------------------------

    @contextmanager
    def session(self, env: Environment) -> Iterator[ssh.Session]:
        """Talk to the host side on h1; `env`: its SEMISHARED_*, or what becomes of what it asks of libvirt,
        by virsh's VERB.

        DIE_IN=VERB and DIE_AFTER=SECONDS, or FAIL_IN=VERB and FAIL=before|after|never|slow: libvirt_proxy.py.
        """
        how = env.get("DIE_AFTER") or env.get("FAIL", "")
        with self._proxy(env.get("DIE_IN") or env["FAIL_IN"], how) if how else nullcontext():
            extra = {
                **self.environment,
                **{key: value for key, value in env.items() if key.startswith("SEMISHARED_")},
            }
            ssh.subprocess = fork_server.Starter(self._server, extra)  # type: ignore[assignment, attr-defined]
            try:
                session = ssh.Session("localhost", "test", Config())
            finally:
                ssh.subprocess = subprocess  # type: ignore[attr-defined] # replaced above
            self.talk = session
            with session:
                yield session

    @contextmanager
    def _proxy(self, verb: str, how: str) -> Iterator[None]:
        """Have whoever asks libvirt on h1, within the block, ask one that lets a verb go wrong."""
        script = self.host.path(f"{PROXY}.py")
        script.write_text(Path(libvirt_proxy.__file__).read_text())
        kvmrc = self.host.path(KVMRC)
        before = kvmrc.read_text()
        proxy = self.host.popen(
            ["/usr/bin/python3", "-I", f"{PROXY}.py", PROXY, verb, how], stdout=subprocess.PIPE
        )
        try:
            assert proxy.stdout and proxy.stdout.readline() == b"ready\n"
            kvmrc.write_text(f"{before}\nLIBVIRT_URI='qemu+unix:///system?socket={PROXY}'\n")
            yield
        finally:
            kvmrc.write_text(before)
            proxy.kill()
            proxy.wait()

    def run(self, env: Environment, *steps: s.Step) -> List[object]:
        with self.session(env) as session:
            return session.run(steps)

    @staticmethod
    def ref(disk: int) -> s.DiskRef:
        return s.DiskRef(VM, disk, VM_DIR)

    def change(
        self,
        env: Environment,
        what: str,
        disk: int,
        number: int,
        known: Sequence[int] = (),
        domain: str = DOMAIN,
    ) -> None:
        """Do what tm/snap_* does: ask, plan, do, in one session."""
        request = args.SnapshotPlace.parse([f"h1:{VM_DIR}/disk.{disk}", str(number), str(VM), "100"])
        with self.session(env) as session:
            facts = snapshots.Facts.parse(session.run([s.DescribeDisk(self.ref(disk), domain)])[0])
            if what == "create":
                steps = snapshots.create(request, facts, domain, *(["SUSPEND"] if domain else []))
            else:
                steps = snapshots.delete(request, facts, domain)
            session.run([*steps, *snapshots.tidy(request, facts, tuple(known), domain)])

    def back_up(self, env: Environment, freeze: str, since: Optional[int] = None) -> None:
        """Back all disks up; `since`: the increment that is stored, -1 for none."""
        step = s.BackUp(VM, VM_DIR, BACKUP, ("0", "1", "2", "3"), DOMAIN, freeze, "PFZNPjwvVk0+")
        chain = 1 if since is not None and since >= 0 else -1
        self.run(env, step._replace(since=since, chain=chain))

    def end_backup(self, env: Environment) -> None:
        self.run(env, s.EndBackup(VM, VM_DIR, BACKUP, DOMAIN))

    # -- its domain ---------------------------------------------------------------------------------

    def virsh(self, *argv: str, check: bool = True) -> str:
        return self.host.run([*VIRSH, *argv], check=check).stdout.decode().strip()

    @contextmanager
    def _domain(self) -> Iterator[Any]:
        """Yield the domain as libvirt's binding has it: what is asked hundreds of times starts no virsh."""
        with domains.libvirt_of(self.host) as connection:
            yield connection.lookupByName(DOMAIN)

    def start(
        self, boot: str = "", devices: str = "", memory_mib: int = 16, without: Sequence[int] = ()
    ) -> None:
        """Start the domain as its records say; `boot`, `devices`: XML of what it boots, and of what it has
        beside the disks.
        """
        disks = ""
        for disk in sorted(set(range(4)) - set(without)):
            record = self.record(disk)
            disks += (
                f"<disk type='file' device='disk'><driver name='qemu' type='{record['format']}'/>"
                f"<source file='{record['path']}'/><target dev='vd{'abcd'[disk]}' bus='virtio'/></disk>"
            )
        xml = (
            f"<domain type='{self.cloud.lab.virt}'><name>{DOMAIN}</name><memory "
            f"unit='MiB'>{memory_mib}</memory><vcpu>1</vcpu>"
            f"<os><type arch='x86_64' "
            f"machine='pc'>hvm</type>{boot or layout.HALT_XML}</os><devices>{disks}{devices}"
            "<controller type='usb' model='none'/><memballoon model='none'/></devices></domain>"
        )
        with domains.libvirt_of(self.host) as connection:
            connection.createXML(xml)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have somebody else pause the domain for the block, in which what is done is refused for that."""
        with self._domain() as domain:
            domain.suspend()
        with pytest.raises(SemisharedError, match=r"is paused|paused by somebody else"):
            yield
        with self._domain() as domain:
            domain.resume()

    def end_domain(self, at_work: bool = False) -> None:
        """Pull the plug: what QEMU has not written is lost. `at_work`: in the midst of a job of its."""
        self._may_leak |= at_work
        pid_file = self.host.path(f"/run/libvirt/qemu/{DOMAIN}.pid")
        if pid_file.exists():
            self.host.run(["kill", "-KILL", pid_file.read_text().strip()], user="root", check=False)
        until(lambda: DOMAIN not in domains.names(self.host), 20, "no domain", 0.02)

    # -- its files ------------------------------------------------------------------------------------

    def _parts(self) -> Dict[str, Path]:
        names = {"vm": SYSTEM, "bases": BASE_STORE, "store": STORE}
        devices = {f"device{number}": path for number, path in enumerate(self._devices)}
        return {name: self.host.path(path) for name, path in {**names, **devices}.items()}

    def save(self, name: str) -> None:
        """Keep all files; the domain must be off."""
        for part, path in self._parts().items():
            (self.top / name).mkdir(exist_ok=True)
            subprocess.run(["cp", "-a", "--sparse=always", path, self.top / name / part], check=True)

    def restore(self, name: str) -> None:
        """Go back to kept files, without a domain."""
        self.end_domain()
        self._may_leak = False
        for part, path in self._parts().items():
            for entry in os.scandir(path):
                if entry.is_dir(follow_symlinks=False):
                    # A watch of the host may be removing its own file there.
                    subprocess.run(["rm", "-rf", entry.path], check=True)
                else:
                    os.unlink(entry.path)
            subprocess.run(["cp", "-a", "--sparse=always", f"{self.top}/{name}/{part}/.", path], check=True)
            copied(path)

    def write(self, disk: int, mark: int) -> None:
        """Write as the guest would, while the domain is off."""
        record = self.record(disk)
        self.host.run(
            ["qemu-io", "-f", record["format"], "-c", f"write -q -P {mark} {mark}M 512k", record["path"]]
        )

    def write_running(self, disk: int, mark: int) -> None:
        """Write as the guest would, while the domain runs, and let that be written out."""
        import libvirt_qemu

        device = f"/machine/peripheral/virtio-disk{disk}/virtio-backend"
        with self._domain() as domain:
            for command in (f"write -P {mark} {mark}M 512k", "flush"):
                said = libvirt_qemu.qemuMonitorCommand(domain, f'qemu-io -d {device} "{command}"', HMP)
                # What it has to say of a write that is done goes into its log.
                assert not said.strip(), said

    def record(self, disk: int) -> Dict[str, str]:
        found = json.loads(self.host.path(f"{VM_DIR}/.semishared/disk.{disk}.json").read_text())
        assert isinstance(found, dict)
        return found

    def listing(self) -> Dict[str, Tuple[str, ...]]:
        """List what there is of the VM, on host and store, with records, links and who lies over whom."""
        found: Dict[str, Tuple[str, ...]] = {}
        for part, top in self._parts().items():
            for folder, folders, names in os.walk(top):
                for name in sorted([*folders, *names]):
                    path = f"{folder}/{name}"
                    shown = re.sub(MARK, "ss-MARK", f"{part}/{os.path.relpath(path, top)}")
                    if "/locks/" in shown:
                        continue
                    if os.path.islink(path):
                        found[shown] = ("link", os.readlink(path))
                    elif os.path.isdir(path):
                        found[shown] = ("directory",)
                    elif name.endswith(".json"):
                        # What is random by nature: when a session began.
                        found[shown] = (Path(path).read_text(),) if name.startswith("disk.") else ("file",)
                    else:
                        found[shown] = ("file", oct(os.lstat(path).st_mode), *layers.backing_of(path))
        return found

    def outside(self, path: str) -> Path:
        """Return where a file of the host is on this machine: links of directories lead to where they do on
        the host.
        """
        folder, *left = "/", *path.strip("/").split("/")
        while len(left) > 1:
            name = left.pop(0)
            target = self.host.path(os.path.join(folder, name))
            if name != ".." and os.path.islink(target):
                left = [*os.readlink(target).strip("/").split("/"), *left]
                folder = "/" if os.readlink(target).startswith("/") else folder
            else:
                folder = os.path.normpath(os.path.join(folder, name))
        return self.host.path(os.path.join(folder, left[0]))

    def reads(self, path: str, format: str) -> str:
        """Return the hash of what a guest would read from a file, through all below it; the same bytes are
        read once.
        """
        key, file = [format], path
        while file:
            outside = str(self.outside(file))
            key.append(file_digest(Path(outside)))
            if os.path.islink(outside):
                outside = os.path.join(os.path.dirname(outside), os.readlink(outside))
            below = layers.backing_of(outside)[0] if format == "qcow2" or len(key) > 2 else ""
            file = os.path.join(os.path.dirname(file), below) if below else ""
        known = tuple(key)
        if known not in self._read:
            self.host.run(["qemu-img", "convert", "-U", "-f", format, "-O", "raw", path, "/tmp/reads"])
            self._read[known] = file_digest(self.host.path("/tmp/reads"))
        return self._read[known]

    def _check_header(self, path: str) -> None:
        """Have QEMU check what a qcow2 file says of itself; the same bytes are checked once.

        A QEMU that is killed at work may leave clusters that it had taken and no table names yet: leaks,
        which cost space and no data.
        """
        known = file_digest(self.outside(path))
        if known not in self._checked:
            done = self.host.run(["qemu-img", "check", "-q", "-f", "qcow2", path], check=False)
            assert done.returncode in ((0, LEAKS) if self._may_leak else (0,)), (path, done.stderr)
            self._checked.add(known)

    def check_running(self, disk: int, now: bytes) -> None:
        """See that the running guest writes to what is recorded, and reads what it must: its QEMU copies the
        disk out.
        """
        self.check_opened(disk)
        self.run({}, s.SaveDisk(self.ref(disk), f"{STORE}/seen", "raw", DOMAIN))
        seen = self.host.path(f"{STORE}/seen")
        assert file_digest(seen) == digest(now), "what the running guest has"
        seen.unlink()

    def check_opened(self, disk: int) -> None:
        """See that the running guest writes to what is recorded."""
        with self._domain() as domain:
            disks = ElementTree.fromstring(domain.XMLDesc()).findall("devices/disk")
        opened = {one.find("target").get("dev"): one.find("source").get("file", "") for one in disks}  # type: ignore[union-attr]
        assert os.path.normpath(opened[f"vd{'abcd'[disk]}"]) == os.path.normpath(self.record(disk)["path"])

    def put_right(self) -> None:
        """Do what vmm/deploy does before it starts the VM."""
        self.run({}, s.DescribeDisk(self.ref(OVERLAY), ""))

    def check(self, disk: int, now: bytes, kept: Dict[int, bytes]) -> None:
        """See that the disk as recorded, and every snapshot, hold what they must; no guest runs."""
        record = self.record(disk)
        path = record["path"]
        assert self.reads(path, record["format"]) == digest(now), "what the next start would open"
        if record["format"] == "qcow2":
            self._check_header(path)
        in_place = disk == IN_PLACE
        folder = f"{self.mine}.snap" if in_place else os.path.dirname(path)
        outside = str(self.outside(f"{folder}/0").parent)
        tree = (
            {}
            if in_place
            else layers.tree(outside, int(os.path.basename(path)), record["format"], record.get("raw_layer"))
        )
        for number in layers.numbered(outside):
            if number in kept and f"{folder}/{number}" != path:
                # One that is not in the tree is the active layer by another name.
                format = str(tree[number]["format"]) if number in tree else record["format"]
                assert self.reads(f"{folder}/{number}", format) == digest(kept[number]), f"snapshot {number}"

    def at_rest(self) -> None:
        """See that the guest runs, and that nothing of ours is under way in it."""
        with self._domain() as domain:
            targets = re.findall(r"<target dev='(\w+)'", domain.XMLDesc())
            said = [
                domain.state()[0],
                *(domain.blockJobInfo(target) or None for target in targets),
                domain.jobInfo()[0],
            ]
            assert not domain.listAllCheckpoints(), "libvirt knows a mark for backups that are over"
        assert targets and said == [RUNNING, *(None for _ in targets), NO_JOB], said
        names = os.listdir(self.host.path(f"{VM_DIR}/.semishared"))
        assert not [
            name
            for name in names
            if not name.startswith(("disk.", "clone.", "committed.", "vm.", "marks.", "ss-"))
        ], names

    def points(self) -> List[str]:
        text = self.host.path(TRACE).read_text()
        return [line.partition(" ")[2] for line in text.splitlines()]

    def forget_trace(self) -> None:
        path = self.host.path(TRACE)
        if path.exists():
            path.unlink()
