# SPDX-License-Identifier: Apache-2.0
"""Make the cluster, start and stop its daemons, look into it."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence, Tuple

from lab import state
from lab.ceph import conf
from lab.node import Node, NodeProcess

if TYPE_CHECKING:
    from semishared.plan.store.ceph_caps import Key

POOL = "one"
BRIDGE, USER, READER, REMOTE = "semishared-bridge", "libvirt", "semishared-reader", "semishared-remote"
SECRET = "1d2a6b1e-5f0c-4e0b-9a57-6f2f0e7a5c11"
"""Under which libvirt on every host knows the key of USER (CEPH_SECRET)."""
REMOTE_SECRET = "7b3f0c52-9d64-4c1e-8a0d-2f5d1f6a4e22"
"""And that of REMOTE, who only reads (SEMISHARED_CEPH_REMOTE_SECRET)."""
OWNER = "ceph"
DAEMONS = ("mon", "mgr", "osd", "mds")
ADMIN = "/etc/ceph/ceph.client.admin.keyring"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
SECRET_XML = f"""\
<secret ephemeral='no' private='yes'>
  <uuid>{SECRET}</uuid>
  <usage type='ceph'><name>{SECRET}</name></usage>
</secret>
"""


class Cluster:
    """The cluster on `node`. Make it with `create()`; take hold of one that is there with the constructor."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._asking = threading.RLock()
        self._session: Optional[NodeProcess] = None

    # -- made once
    # ----------------------------------------------------------------------------------------------------

    def create(self, gib: int = 10, osds: int = 1) -> None:
        """Make the cluster and its pool, and wait until it serves: about 5 s."""
        fsid, made = str(uuid.uuid4()), [str(uuid.uuid4()) for _ in range(osds)]
        self._write("/etc/ceph/ceph.conf", conf.daemons(fsid, self.node.ip, gib, osds), 0o644)
        for daemon in ("mon/ceph-a", "mgr/ceph-a", "mds/ceph-a", *(f"osd/ceph-{i}" for i in range(osds))):
            self._run(["install", "-d", "-o", OWNER, "-g", OWNER, f"/var/lib/ceph/{daemon}"], user="root")
        self._directories()
        # The manager's telemetry reads it when it is loaded (18), and nodes have nothing of /etc/ssl.
        trusted = self.node.root / CERTIFICATES.lstrip("/")
        if trusted.exists():
            self._write(CERTIFICATES, trusted.read_text(), 0o644)
        # Every key is in the keyring the monitor is made with: none needs a running monitor.
        seed = "/var/lib/ceph/seed"
        self._run(["bash", "-euc", _KEYS, "keys", seed, ADMIN, *map(str, range(osds))], user="root")
        address = f"[v2:{self.node.ip}:3300,v1:{self.node.ip}:6789]"
        self._run(
            [
                "monmaptool",
                "--create",
                "--clobber",
                "--fsid",
                fsid,
                "--addv",
                "a",
                address,
                "/var/lib/ceph/monmap",
            ],
            user="root",
        )
        self._run(["chown", OWNER, seed, "/var/lib/ceph/monmap"], user="root")
        making = [self._make_osd(number, osd) for number, osd in enumerate(made)]
        self._run(["ceph-mon", "--mkfs", "-i", "a", "--monmap", "/var/lib/ceph/monmap", "--keyring", seed])
        self._run(["rm", seed], user="root")
        self.start("mon")
        key = "mgr/devicehealth/enable_monitoring"  # it would make a pool of its own
        self.ask(
            ["command", ["config set"], {"who": "mgr", "name": key, "value": "false", "force": True}],
            *(["command", ["osd new"], {"uuid": osd, "id": number}] for number, osd in enumerate(made)),
        )
        if any([process.wait() for process in making]):
            raise RuntimeError(
                f"ceph-osd --mkfs: {self.node.path('/var/log/ceph/mkfs.log').read_text()[-2000:]}"
            )
        self.start("mgr", "osd")
        self.ask(
            ["wait", ["osd"], {}],
            # Clones of snapshots nobody protects (clone v2), as any cluster without clients older than 2018
            # allows.
            ["command", ["osd set-require-min-compat-client"], {"version": "mimic"}],
            ["pool", [POOL], {}],
            ["wait", ["mgr"], {}],
        )

    def _make_osd(self, number: int, osd: str) -> NodeProcess:
        """Begin to make what an OSD stores on, beside the monitor's start."""
        make = ["ceph-osd", "--mkfs", "-i", str(number), "--osd-uuid", osd]
        make += ["--no-mon-config", "--monmap", "/var/lib/ceph/monmap"]
        with self.node.path("/var/log/ceph/mkfs.log").open("ab") as log:
            return self.node.popen(
                make, user=OWNER, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def serve(self, front_end: Node, hosts: Sequence[Node]) -> None:
        """Give front-end and hosts what an admin gives them: ceph.conf, the keys of their roles, libvirt's
        secret.
        """
        from semishared.plan.store.ceph_caps import keys  # here: most of the lab does without lib/

        made = {key.user: self.make_key(key) for key in keys(USER, POOL, READER, BRIDGE, remote=REMOTE)}
        for node in (front_end, *hosts):
            self.introduce(node)
        self.give_key(front_end, BRIDGE, made[BRIDGE])
        for host in hosts:
            self.give_key(host, USER, made[USER])
            self.give_key(host, READER, made[READER])
            self.give_key(host, REMOTE, made[REMOTE])
            self.define_secret(host, SECRET, made[USER])
            self.define_secret(host, REMOTE_SECRET, made[REMOTE])

    def make_key(self, key: Key) -> str:
        """Make a user with exactly these capabilities and return its key."""
        caps = [word for cap in key.caps for word in cap]
        made = self.ask(["command", ["auth get-or-create"], {"entity": f"client.{key.user}", "caps": caps}])[
            0
        ]
        return str(made[0]["key"])

    def introduce(self, node: Node) -> None:
        """Write the clients' ceph.conf on a node."""
        fsid = [line for line in self._conf().splitlines() if line.startswith("fsid")][0].split()[-1]
        self._write("/etc/ceph/ceph.conf", conf.clients(fsid, self.node.ip), 0o644, node)

    def give_key(self, node: Node, user: str, key: str) -> None:
        """Put a user's keyring where oneadmin of a node, and nobody else there, can read it."""
        self._write(
            f"/etc/ceph/ceph.client.{user}.keyring",
            f"[client.{user}]\n\tkey = {key}\n",
            0o600,
            node,
            node.uid_of("oneadmin"),
        )

    def key(self, user: str) -> str:
        """Return a user's key."""
        return str(self.ask(["command", ["auth get-key"], {"entity": f"client.{user}"}])[0]["key"])

    def define_secret(self, host: Node, secret: str, key: str) -> None:
        """Tell a host's libvirt a key, by a file: it is on no command line."""
        virsh = ["virsh", "-q", "-c", "qemu:///system"]
        self._write("/root/secret.xml", SECRET_XML.replace(SECRET, secret), 0o600, host)
        self._write("/root/secret.key", key, 0o600, host)
        host.run([*virsh, "secret-define", "/root/secret.xml"], user="root", cwd="/root")
        host.run([*virsh, "secret-set-value", secret, "--file", "/root/secret.key"], user="root", cwd="/root")
        host.run(["rm", "/root/secret.xml", "/root/secret.key"], user="root")

    def datastore(self, name: str = "semi_rbd", **attributes: str) -> str:
        """Return the template of an image datastore on this cluster; `attributes` are added, or replace what
        is there.
        """
        values = {
            "NAME": name,
            "TYPE": "IMAGE_DS",
            "DS_MAD": "semishared",
            "TM_MAD": "semishared",
            "DISK_TYPE": "RBD",
            "RBD_FORMAT": "2",
            "POOL_NAME": POOL,
            "CEPH_HOST": self.node.ip,
            "CEPH_USER": USER,
            "CEPH_SECRET": SECRET,
            "SEMISHARED_CEPH_READER": READER,
            "SEMISHARED_CEPH_BRIDGE_USER": BRIDGE,
            "SEMISHARED_CEPH_REMOTE": REMOTE,
            "SEMISHARED_CEPH_REMOTE_SECRET": REMOTE_SECRET,
            **attributes,
        }
        return " ".join(f'{key}="{value}"' for key, value in values.items())

    # -- daemons
    # ------------------------------------------------------------------------------------------------------

    def osds(self) -> List[int]:
        """Return the numbers of the OSDs, up or not."""
        return sorted(int(path.name[5:]) for path in self.node.path("/var/lib/ceph/osd").iterdir())

    def start(self, *daemons: str) -> None:
        """Start daemons (default: monitor, manager, all OSDs; `osd.1` is one of these); returns once they
        have started, which is before they serve.
        """
        self._directories()
        for kind, name in (one for daemon in daemons or ("mon", "mgr", "osd") for one in self._names(daemon)):
            # The manager's modules print, and die where there is no stderr: it stays in the foreground of a
            # shell's job.
            run = 'exec >>/var/log/ceph/$1.out 2>&1 </dev/null; ulimit -n 8192; "ceph-$1" -i "$2"'
            if kind == "mgr":
                run = 'exec >>/var/log/ceph/$1.out 2>&1 </dev/null; setsid "ceph-$1" -f -i "$2" &'
            self._run(["bash", "-c", run, "start", kind, name])

    def _names(self, daemon: str) -> List[Tuple[str, str]]:
        kind, _, name = daemon.partition(".")
        if kind != "osd":
            return [(kind, "a")]
        return [(kind, name)] if name else [(kind, str(number)) for number in self.osds()]

    def stop(self, *daemons: str, hard: bool = True) -> None:
        """End daemons (default: all that run), with SIGKILL, or in order when not `hard`; data is kept."""
        self.hang_up()
        for daemon in daemons or DAEMONS[::-1]:
            for pid in self.pids(daemon):
                begun = state.started(pid)
                if not hard:
                    os.kill(pid, signal.SIGTERM)
                    deadline = time.monotonic() + 15.0
                    while state.alive(pid, begun) and time.monotonic() < deadline:
                        time.sleep(0.02)
                state.kill(pid, begun)

    def wait(self) -> None:
        """Wait until the cluster serves again after `start()`."""
        self.ask(["wait", ["osd"], {}], ["answers", [POOL], {}], ["wait", ["mgr"], {}])

    @contextmanager
    def stopped(self, *daemons: str) -> Iterator[None]:
        """Have daemons (default: the whole cluster) down inside the block, and serving again after it."""
        gone = daemons or ("mon", "mgr", "osd")
        self.stop(*gone)
        try:
            yield
        finally:
            self.start(*gone)
            self.wait()

    def pids(self, daemon: str) -> List[int]:
        """Return the pids, as seen from outside, of this cluster's running daemons of a kind (mon, mgr, osd,
        mds), or of one of them (`osd.1`).
        """
        kind, _, name = daemon.partition(".")
        mine = os.readlink(f"/proc/{self.node.pid}/ns/pid")
        found = []
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if (
                    words[0] == f"ceph-{kind}".encode()
                    and (not name or words[words.index(b"-i") + 1] == name.encode())
                    and os.readlink(entry / "ns/pid") == mine
                    and state.started(int(entry.name))
                ):
                    found.append(int(entry.name))
            except (OSError, ValueError):
                continue
        return found

    # -- what is in it
    # --------------------------------------------------------------------------------------------------

    def ask(self, *requests: Sequence[Any], timeout: float = 90.0) -> List[Any]:
        """Do things of lab/ceph/session.py as the cluster's admin: [method, arguments, named arguments]
        each.
        """
        with self._asking:
            if self._session is None or self._session.poll() is not None:
                source = (Path(__file__).parent / "session.py").read_text()
                words = ["/usr/bin/python3", "-I", "-c", source]
                self._session = self.node.popen(
                    words, user="root", stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            try:
                return [self._answer(self._session, request, timeout) for request in requests]
            except BaseException:
                self.hang_up()
                raise

    @staticmethod
    def _answer(session: NodeProcess, request: Sequence[Any], timeout: float) -> Any:
        assert session.stdin and session.stdout
        session.stdin.write(json.dumps(request).encode() + b"\n")
        session.stdin.flush()
        # It prints a line when it has done all that was asked: there is never more to read than that.
        if not select.select([session.stdout], [], [], timeout)[0]:
            raise RuntimeError(f"the cluster did not answer in {timeout} s: {request}")
        answer = json.loads(session.stdout.readline() or '"its session has ended"')
        if not isinstance(answer, list):
            raise RuntimeError(f"{request}: {answer}")
        return answer[0]

    def hang_up(self) -> None:
        """End the admin's session; the next one finds the cluster as it is by then."""
        with self._asking:
            session, self._session = self._session, None
            if session:
                session.send_signal(signal.SIGKILL)
                session.communicate()

    def command(self, prefix: str, **words: Any) -> Any:
        """Run a monitor command as the admin; return its answer."""
        return self.ask(["command", [prefix], words])[0]

    def images(self, pool: str = POOL) -> Dict[str, Dict[str, Any]]:
        """Return all images of a pool: size, snaps (name, size, protected), parent, children, watchers,
        lockers.
        """
        answer: Dict[str, Dict[str, Any]] = self.ask(["images", [pool], {}])[0]
        return answer

    def allocated(self, images: Dict[str, str]) -> Dict[str, int]:
        """Return how many bytes the objects of images, POOL/NAME each, have."""
        answer: Dict[str, int] = self.ask(["allocated", [images], {}])[0]
        return answer

    def patterns(self, images: Dict[str, List[int]], count: int) -> Dict[str, List[int]]:
        """Return of images, POOL/NAME each, which byte `count` of them from each offset on all are; -1 where
        they differ.
        """
        answer: Dict[str, List[int]] = self.ask(["patterns", [images, count], {}])[0] if images else {}
        return answer

    def read(self, image: str, count: int, offset: int = 0, pool: str = POOL) -> bytes:
        """Return bytes of an image, or of IMAGE@SNAPSHOT, read as the admin."""
        return base64.b64decode(self.ask(["read", [pool, image, count, offset], {}])[0])

    def snapshot(self, image: str, name: str, *, protect: bool = False) -> None:
        """Take a snapshot of an image as somebody else would."""
        self.ask(["snapshot", [POOL, image, name, protect], {}])

    def remove(self, image: str) -> None:
        """Remove an image with its snapshots, as its admin."""
        self.ask(["remove", [POOL, image], {}])

    def bytes_read(self) -> int:
        """Return how many bytes the OSDs have given to clients so far: data, and headers of a few hundred
        bytes per open.
        """
        return sum(int(self.osd("perf dump", number)["osd"]["op_r_out_bytes"]) for number in self.osds())

    def bytes_written(self) -> int:
        """Return how many bytes the OSDs have got from clients so far."""
        return sum(int(self.osd("perf dump", number)["osd"]["op_w_in_bytes"]) for number in self.osds())

    def sessions(self) -> Dict[str, List[str]]:
        """Return who is connected to the monitor as what user, and from where."""
        found: Dict[str, List[str]] = {}
        for session in self._daemon("mon.a", "sessions"):
            addresses = session.get("addrs", {}).get("addrvec", []) or [
                {"addr": session.get("socket_addr", {}).get("addr", "")}
            ]
            found.setdefault(session["entity_name"], []).append(addresses[0]["addr"].partition(":")[0])
        return found

    def osd(self, command: str, number: int = 0) -> Any:
        """Ask an OSD's admin socket."""
        return self._daemon(f"osd.{number}", command)

    def mds(self, command: str, **words: Any) -> Any:
        """Ask the metadata server's admin socket."""
        return self._daemon("mds.a", command, **words)

    def _daemon(self, daemon: str, command: str, **words: Any) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(str(self.node.path(f"/run/ceph/ceph-{daemon}.asok")))
            connection.sendall(json.dumps({"prefix": command, **words}).encode() + b"\0")
            with connection.makefile("rb") as answer:
                (length,) = struct.unpack(">I", answer.read(4))
                return json.loads(answer.read(length))

    # -- small things
    # ---------------------------------------------------------------------------------------------------

    def rbd(self, *words: str, timeout: float = 60.0) -> bytes:
        """Run the rbd program as the admin, on the cluster's own node."""
        return self.node.run(["rbd", *words], user="root", cwd="/", timeout=timeout).stdout

    def _conf(self) -> str:
        return self.node.path("/etc/ceph/ceph.conf").read_text()

    def _directories(self) -> None:
        for folder in ("/run/ceph", "/var/log/ceph"):
            self._run(["install", "-d", "-o", OWNER, "-g", OWNER, folder], user="root")

    def _run(self, argv: Sequence[str], user: str = OWNER) -> None:
        # Debian builds Ceph without tcmalloc: with many arenas its daemons grow.
        self.node.run(argv, user=user, cwd="/", env={"MALLOC_ARENA_MAX": "2", "LC_ALL": "C"})

    def _write(self, path: str, text: str, mode: int, node: Optional[Node] = None, owner: int = 0) -> None:
        target = (node or self.node).path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(handle, "w") as out:
            os.fchmod(handle, mode)
            os.fchown(handle, owner, owner)
            out.write(text)


_KEYS = """\
# SEED ADMIN'S-KEYRING OSD...
umask 077
make() { # USER KEYRING CAPS...
    local user=$1 file=$2
    shift 2
    ceph-authtool -C "$file" --gen-key -n "$user" "$@" >/dev/null
    ceph-authtool "$seed" --import-keyring "$file" >/dev/null
}
seed=$1 admin=$2
shift 2
ceph-authtool -C "$seed" --gen-key -n mon. --cap mon 'allow *' >/dev/null
make client.admin "$admin" --cap mon 'allow *' --cap osd 'allow *' --cap mds 'allow *' --cap mgr 'allow *'
make mgr.a /var/lib/ceph/mgr/ceph-a/keyring --cap mon 'allow profile mgr' --cap osd 'allow *' --cap mds 'allow *'
for number; do
    make "osd.$number" "/var/lib/ceph/osd/ceph-$number/keyring" --cap mon 'allow profile osd' --cap mgr 'allow profile osd' --cap osd 'allow *'
done
make mds.a /var/lib/ceph/mds/ceph-a/keyring --cap mon 'allow profile mds' --cap mgr 'allow profile mds' --cap osd 'allow *' \\
    --cap mds 'allow *'
chown ceph /var/lib/ceph/*/ceph-*/keyring
"""  # noqa: E501
