# SPDX-License-Identifier: Apache-2.0
"""The four ways to a parallel file system of the paper's figure 4, as this project has them: `bench/run.py
shares`.

Two clients at once, each with a file of its own, in transfers of 1 MiB, on one CephFS: *native*, two hosts
that mount it; *directory into the guest*, a guest on each of them that has a share of ours; *client in the
guest*, the same guests with their kernel's client and a key for that share; *virtual server*, the same guests
as clients of a third one, which exports by NFS what lies on its virtual disk, an RBD image of the same
cluster. Then files that are made, looked up and removed. What one client reads or looks up the other one has
written.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Protocol, Sequence, Tuple

import access_figures
from access_figures import BASE, WAYS, aggregate
from figures import Figure, rounds_within

from lab import Node
from lab.ceph import POOL, USER, Cluster, fs
from lab.hosts import SCRIPTS
from lab.kernel_host import KernelHost
from lab.switch import Switch
from semishared.model.share.share import first_uid
from shares.ceph import CephShares
from shares.cloud import SHARES
from shares.page import ROOT

INSIDE = (Path(__file__).resolve().parent / "access_inside.py").read_text()
OWNER, TENANT = 3, "tenant"
SIZE = "2G"
FILE_MIB, FILES, CHECKED_MIB = 16, 100, 64
SECONDS, ROUNDS = 150, 8
PATIENCE_S = 240
"""What takes seconds on an idle machine."""
CPU = "qemu64,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt"
"""Of guests: any processor of theirs has an instruction for Ceph's checksums."""
# As libvirt 9.0 writes them for what plan/libvirt/filesystems.py has in the domain XML.
OPTIONS = "source={source},sandbox=namespace,xattr,flock,posix_lock"
DEVICE = "vhost-user-fs-pci,chardev=share,queue-size=1024,tag=share"
SERVE = (
    "modprobe -a crc32c_intel nfsd xfs; mkfs.xfs -q /dev/vda; mkdir -p /export; mount /dev/vda /export\n"
    "mount -t tmpfs tmpfs /var/lib/nfs; mkdir -p /var/lib/nfs/sm /var/lib/nfs/sm.bak "
    "/var/lib/nfs/v4recovery\n"
    "touch /var/lib/nfs/etab /var/lib/nfs/rmtab; mount -t nfsd nfsd /proc/fs/nfsd\n"
    "echo '/export *(rw,sync,no_subtree_check,no_root_squash,fsid=0)' >/etc/exports\n"
    # As a server has it that is larger than this one.
    "echo 1048576 >/proc/fs/nfsd/max_block_size\n"
    "exportfs -ra; rpc.mountd -N 3; rpc.nfsd -N 3 4; echo Y >/proc/fs/nfsd/v4_end_grace"
)


Samples = Dict[str, List[float]]
"""As access_figures.py has them."""


class Client(Protocol):
    """Somebody on a machine who does what is asked (access_inside.py)."""

    def begin(self, *order: object) -> None:
        """Ask for something."""

    def finish(self) -> Any:
        """Wait until it is done; return the answer."""


class OnHost:
    """A client on a host, as root of the owner's guests."""

    def __init__(self, host: Node) -> None:
        uid = first_uid(OWNER)
        argv = [
            "setpriv",
            f"--reuid={uid}",
            f"--regid={uid}",
            "--clear-groups",
            "/usr/bin/python3",
            "-I",
            "-c",
            INSIDE,
        ]
        self._process = host.popen(
            argv,
            user="root",
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def begin(self, *order: object) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def finish(self) -> Any:
        assert self._process.stdout
        said, end = self._process.stdout.readline(), self._process.stdout.readline()
        if not end.startswith(b"== "):
            raise RuntimeError((said + end + self._process.stdout.read()).decode())
        return json.loads(said)


class InGuest:
    """A client in a guest, as its root."""

    def __init__(self, guest: KernelHost) -> None:
        self._program = guest.start_program(["/usr/bin/python3", "-I", "-c", INSIDE])
        self._asked = 0

    def begin(self, *order: object) -> None:
        self._program.write(json.dumps(order).encode() + b"\n")

    def finish(self) -> Any:
        end = f"== {self._asked}\n"
        self._asked += 1
        return json.loads(self._program.wait_for(end, PATIENCE_S).split(end)[0].splitlines()[-1])


@contextmanager
def virtiofsd(host: Node, source: str, path: Path) -> Iterator[int]:
    """Give a share of a host to a guest whose QEMU connects to `path`: our program, started as libvirt does;
    yield its process.
    """
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1)
        argv = [
            f"{SCRIPTS}/vmm/semishared/virtiofsd",
            f"--fd={listening.fileno()}",
            "-o",
            OPTIONS.format(source=source),
        ]
        process = host.popen(
            argv,
            user="root",
            cwd="/",
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def below(top: int) -> List[int]:
    """Return a process and all that descend from it."""
    parents: Dict[int, List[int]] = defaultdict(list)
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            parents[int(fields[1])].append(int(entry.name))
    found = [top]
    for pid in found:
        found += parents[pid]
    return found


def cpu(pids: Sequence[int]) -> float:
    """Return the seconds that processes have been on a processor, all their threads: clock_getcpuclockid(3),
    which has nanoseconds.
    """
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


class Rig:
    """A cluster with a share on it, two hosts, a guest on each, and a guest that serves."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._top = Path(tempfile.mkdtemp(prefix="bench-shares-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, self._top)
        self._shares = stack.enter_context(CephShares.up())
        self.lab = self._shares.lab
        _, *self.hosts = self.lab.hosts
        self._source, key = self._provide()
        switch = Switch(self.lab)
        # QEMU is on the switch itself, and to reach the cluster from there.
        subprocess.run(
            [
                *switch.enter,
                "ip",
                "address",
                "add",
                f"{self.lab.fe.ip.rpartition('.')[0]}.100/24",
                "dev",
                "br0",
            ],
            check=True,
        )
        self._server = KernelHost(
            "server", switch, memory_mib=768, qemu_arguments=["-cpu", CPU, *self._disk()]
        )
        stack.enter_context(self._server)
        started, guests = [], []
        for number, host in enumerate(self.hosts):
            path = self._top / f"share{number}"
            started.append(stack.enter_context(virtiofsd(host, self._source, path)))
            argv = ["-cpu", CPU, "-chardev", f"socket,id=share,path={path}", "-device", DEVICE]
            guests.append(stack.enter_context(KernelHost(f"c{number}", switch, qemu_arguments=argv)))
        self._server.script(SERVE, timeout=PATIENCE_S)
        for guest in guests:
            self._mount(guest, key)
        self._daemons = {
            "virtiofsd": [pid for top in started for pid in below(top)],
            "ceph-fuse": [pid for host in self.hosts for pid in Cluster(host).pids("fuse")],
        }
        natives = [OnHost(host) for host in self.hosts]
        virtual = [InGuest(guest) for guest in guests]
        self._ways: Dict[str, Tuple[Sequence[Client], str]] = {
            "native": (natives, self._source),
            **{way: (virtual, f"/mnt/{way}") for way in WAYS if way != "native"},
        }

    def _provide(self) -> Tuple[str, str]:
        """Make the share, mount it on the hosts; return where it is there, and the key of who may have
        nothing else.
        """
        image = self._shares.oned.image_create(
            SHARES, "bench", path=f"new:{SIZE}", type="FILESYSTEM", uid=OWNER
        )
        words = ["ceph", "fs", "subvolume", "authorize", fs.NAME, f"share-{image}", TENANT, "one"]
        self.lab.ceph.node.run(words, user="root", cwd="/")
        for host in self.hosts:
            # Who tests what several hosts see has it mounted without caches.
            host.run(["umount", ROOT], user="root")
            words = [
                "ceph-fuse",
                "--id",
                "shares-mount",
                "--client_fs",
                fs.NAME,
                "-r",
                "/volumes/one",
                "-o",
                "nosuid,nodev",
                ROOT,
            ]
            host.run(words, user="root", cwd="/")
        return self._shares.source(image), self.lab.ceph.key(TENANT)

    def _disk(self) -> List[str]:
        """Return what QEMU needs to be told for a disk that is an image of the cluster."""
        self.lab.ceph.rbd("create", "--size", SIZE, f"{POOL}/server")
        conf, keyring = self._top / "ceph.conf", self._top / "keyring"
        keyring.write_text(f"[client.{USER}]\n\tkey = {self.lab.ceph.key(USER)}\n")
        conf.write_text(
            self.hosts[0].path("/etc/ceph/ceph.conf").read_text() + f"[client]\nkeyring = {keyring}\n"
        )
        disk = {
            "driver": "rbd",
            "node-name": "server",
            "pool": POOL,
            "image": "server",
            "user": USER,
            "conf": str(conf),
        }
        return [
            "-blockdev",
            json.dumps({**disk, "cache": {"direct": True}}),
            "-device",
            "virtio-blk-pci,drive=server",
        ]

    def _mount(self, guest: KernelHost, key: str) -> None:
        """Mount all that a guest has."""
        guest.put("/etc/ceph/secret", key.encode(), 0o600)
        inside = self._source.replace(ROOT, "/volumes/one")
        guest.script(
            "modprobe -a crc32c_intel ceph nfsv4; mkdir -p /mnt/directory /mnt/client /mnt/virtual\n"
            "mount -t virtiofs share /mnt/directory\n"
            f"mount -t ceph {self.lab.ceph.node.ip}:6789:{inside} /mnt/client -o "
            f"name={TENANT},secretfile=/etc/ceph/secret,fs={fs.NAME}\n"
            f"mount -t nfs4 -o vers=4.2,hard {self._server.address}:/ /mnt/virtual",
            timeout=PATIENCE_S,
        )

    def both(self, way: str, *orders: Sequence[object]) -> List[Any]:
        """Have the two clients do something at once; return their answers."""
        clients, _ = self._ways[way]
        for client, order in zip(clients, orders):
            client.begin(*order)
        return [client.finish() for client in clients]

    def used(self) -> Dict[str, float]:
        """Return the seconds of each kind of daemon so far."""
        return {name: cpu(pids) for name, pids in self._daemons.items()}

    def measure(self, way: str, run: int, mib: int, files: int, samples: Samples) -> None:
        """Have both clients do all of it once: what they got, and what daemons cost for each GiB."""
        top = self._ways[way][1]
        mine = [f"{top}/{way}-{run}-{number}" for number in range(2)]
        self.both(way, *(("make", folder) for folder in mine))
        for what, folders in (("write", mine), ("read", mine[::-1])):
            before = self.used()
            seconds = self.both(
                way, *((what, f"{folder}/file", 2 * run + mine.index(folder), mib) for folder in folders)
            )
            samples[f"{way}/{what}"].append(aggregate(mib, seconds))
            for name, after in self.used().items():
                samples[f"cpu/{name}/{way}/{what}"].append((after - before[name]) * 1024 / (2 * mib))
            if way == BASE:
                # What a server of that size has in memory of files of the paper's size is little.
                self._server.script("sync; echo 3 >/proc/sys/vm/drop_caches")
        for what, folders in (("create", mine), ("stat", mine[::-1]), ("unlink", mine)):
            seconds = self.both(way, *((what, folder, files) for folder in folders))
            samples[f"{way}/{what}"].append(aggregate(files, seconds))
        self.both(way, *(("remove", folder) for folder in mine))

    def processors(self, samples: Samples) -> None:
        """Have a processor of a host and one of a guest compute something, one after the other: MiB per
        second.
        """
        for name, way in (("host", "native"), ("guest", BASE)):
            client = self._ways[way][0][0]
            client.begin("checksum", CHECKED_MIB)
            samples[f"crc/{name}"].append(CHECKED_MIB / client.finish())


def shares(quick: bool) -> List[Figure]:
    """Measure all ways in each round, in an order of its own."""
    samples: Samples = defaultdict(list)
    mib, files = (4, 20) if quick else (FILE_MIB, FILES)
    with ExitStack() as stack:
        rig = Rig(stack)
        for number in rounds_within(SECONDS, 1 if quick else ROUNDS):
            for way in random.Random(number).sample(list(WAYS), len(WAYS)):
                rig.measure(way, number, mib, files, samples)
            rig.processors(samples)
    return access_figures.all_of(samples)
