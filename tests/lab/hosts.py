# SPDX-License-Identifier: Apache-2.0
"""Put up a front-end and some hosts on this one machine, and take them down again without a trace."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Optional

from lab import caches, layout, roots, state
from lab.ceph import Cluster
from lab.node import Node, Site

MOST_HOSTS = 17
TOOLS = (
    "sshd",
    "libvirtd",
    "virsh",
    "qemu-system-x86_64",
    "qemu-kvm-one",
    "ip",
    "nsenter",
    "setpriv",
    "gcc",
    "lz4",
    "rsync",
)
CEPH_TOOLS = ("ceph-mon", "ceph-mgr", "ceph-osd", "rbd")
REMOTES = "/var/lib/one/remotes"
SCRIPTS = "/var/tmp/one"
OLDER_QEMU = ": a VM that was started on the newer may have a machine type that the older lacks"
"""What doctor says of hosts whose QEMUs differ."""


class Lab:
    """A running lab. Use `with Lab.up(hosts=2) as lab:`."""

    def __init__(self, folder: Path) -> None:
        """Take hold of the lab in this state directory; `Lab.up()` makes one."""
        record = state.read(folder)
        self.folder = folder
        self.id: str = record["id"]
        self.virt: str = "kvm" if record["kvm"] else "qemu"
        self.stores: Sequence[int] = tuple(record["stores"])
        self.uid, self.gid = layout.owner_ids()
        site = Site(folder, record["keeper"], self.stores, record["kvm"], record["sharedfs"])
        releases: Mapping[str, int] = record.get("releases", {})
        self._nodes: dict[str, Node] = {
            name: Node(site, name, ip, roots.of(releases.get(name))) for name, ip in record["nodes"].items()
        }
        self.machine = roots.machine(releases.get(host.name) for host in self.hosts)
        """The machine type of guests that may go to each host."""
        self._namespaces: set[str] = set()
        self._guard: Optional[subprocess.Popen[bytes]] = None
        self._ceph: Optional[Cluster] = None

    def unexplained(self, findings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what doctor has found, but for what the releases of the hosts explain: it has to warn of the
        older QEMU where they are two.
        """
        explained = [item for item in findings if OLDER_QEMU in item["what"]]
        assert len(explained) == (len({host.root for host in self.hosts}) > 1), findings
        return [item for item in findings if item not in explained]

    @property
    def fe(self) -> Node:
        """Return the front-end."""
        return self._nodes["fe"]

    @property
    def hosts(self) -> list[Node]:
        """Return the hosts in order."""
        return [node for name, node in self._nodes.items() if not name.startswith(("fe", "ceph"))]

    @property
    def front_ends(self) -> list[Node]:
        """Return the front-ends in order: one, but for a lab of an HA group."""
        return [node for name, node in self._nodes.items() if name.startswith("fe")]

    @property
    def ceph(self) -> Cluster:
        """Return the Ceph cluster of a lab put up with one."""
        if self._ceph is None:
            self._ceph = Cluster(self._nodes["ceph"])
        return self._ceph

    @property
    def nodes(self) -> list[Node]:
        """Return all nodes: front-end, cluster if there is one, hosts."""
        return list(self._nodes.values())

    def node(self, name: str) -> Node:
        """Return the node called `fe`, `fe2`, `ceph`, `h1`, `h2`, ..."""
        return self._nodes[name]

    @classmethod
    def standing(cls) -> list[Lab]:
        """List the labs put up to stay (`lab up`) that are still there."""
        found = []
        for folder in state.folders():
            record = state.read(folder)
            if (
                record.get("stay")
                and "nodes" in record
                and state.alive(record["keeper"], record["keeper_start"])
            ):
                found.append(cls(folder))
        return found

    # -- up and down
    # ----------------------------------------------------------------------------------------------

    @classmethod
    def up(
        cls,
        hosts: int = 2,
        stores: Sequence[int] = (100,),
        stay: bool = False,
        ceph: int = 0,
        releases: Optional[Mapping[str, int]] = None,
        front_ends: int = 1,
    ) -> Lab:
        """Put up a lab, with a Ceph cluster of so many OSDs if told; with `stay` it remains when this process
        ends, until `lab down`.

        `front_ends`: 2 for an HA group of `fe` and `fe2`.

        `releases`: which nodes have the programs of another Debian release than this machine's (roots.py);
        where it is not said, the environment does.
        """
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"a lab has 1 to {MOST_HOSTS} hosts, not {hosts}")
        if os.geteuid():
            raise PermissionError("the lab needs root: it makes namespaces and mounts")
        missing = [
            tool
            for tool in (*TOOLS, *(CEPH_TOOLS if ceph else ()))
            if not shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin")
        ]
        if missing:
            raise RuntimeError(f"not on this machine: {' '.join(missing)}; run tests/lab/provision.sh")
        state.sweep()
        if releases is None:
            releases = roots.platform(os.environ.get(roots.PLATFORM, ""), hosts)
        machines = {releases.get(f"h{number}") for number in range(1, hosts + 1)}
        for release in machines:
            if not caches.capabilities(roots.of(release)):
                only = {} if release is None else {"h1": release}
                with cls._up(1, (), stay=False, ceph=0, releases=only) as lab:
                    lab._ask_qemu()
        return cls._up(hosts, stores, stay, ceph, releases, front_ends)

    @classmethod
    def _up(
        cls,
        hosts: int,
        stores: Sequence[int],
        stay: bool,
        ceph: int,
        releases: Mapping[str, int],
        front_ends: int = 1,
    ) -> Lab:
        sharedfs = caches.build([caches.HERE / "sharedfs.c"], ["-shared", "-fPIC"])
        record = {
            "owner": os.getpid(),
            "owner_start": state.started(os.getpid()),
            "stay": stay,
            "stores": list(stores),
            "kvm": caches.kvm_works(),
            "sharedfs": f"/opt/{sharedfs.name}.so",
        }
        folder = state.create(record)
        guard: Optional[subprocess.Popen[bytes]] = None
        try:
            guard = cls._start_guard(folder)
            record = state.read(folder)
            names = {"fe": f"{record['subnet']}.1"}
            if front_ends > 1:
                names["fe2"] = f"{record['subnet']}.3"
            if ceph:
                names["ceph"] = f"{record['subnet']}.2"
            names.update(
                {f"h{number}": f"{record['subnet']}.{10 + number}" for number in range(1, hosts + 1)}
            )
            record["nodes"] = names
            record["releases"] = dict(releases)
            state.write(folder, record)
            lab = cls(folder)
            lab._guard = guard
            lab._prepare(sharedfs, names)
            lab._start_all()
            if ceph:
                lab.ceph.create(osds=int(ceph))
                lab.ceph.serve(lab.fe, lab.hosts)
            if stay:
                assert guard.stdin
                os.write(guard.stdin.fileno(), b"stay")
        except BaseException:
            _end(folder, guard)
            raise
        return lab

    @staticmethod
    def _start_guard(folder: Path) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "lab.guard", str(folder)]
        env = {**os.environ, "PYTHONPATH": str(caches.HERE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        log = (folder / "guard.log").open("wb")
        guard = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=env,
            cwd="/",
            start_new_session=True,
        )
        log.close()
        assert guard.stdout
        if not guard.stdout.readline():
            raise RuntimeError(
                "the lab's keeper did not start: are namespaces and bridges allowed on this machine?"
            )
        guard.stdout.close()
        return guard

    def _prepare(self, sharedfs: Path, names: dict[str, str]) -> None:
        keys = self.folder / "keys"
        layout.make_keys(keys)
        for store in self.stores:
            (self.folder / "stores" / str(store)).mkdir(parents=True)
            os.chown(self.folder / "stores" / str(store), self.uid, self.gid)

        def one(node: Node) -> None:
            layout.lay_out(node.folder, keys, node.name, names, self.stores, node.root)
            shutil.copy(sharedfs, node.folder / "opt" / (sharedfs.name + ".so"))
            seed = caches.capabilities(node.root) if node in self.hosts else None
            if seed:
                target = node.folder / "var/cache/libvirt/qemu/capabilities"
                shutil.copytree(seed, target)
                for path in (target, *target.iterdir()):
                    os.chown(path, self.uid, self.gid)

        _each(one, self._nodes.values())

    def _start_all(self) -> None:
        _each(Node.start, self._nodes.values())
        for node in self._nodes.values():
            self._namespaces |= state.namespaces_of(node.pid)
        self._namespaces |= state.namespaces_of(self.fe.site.keeper)
        self._namespaces -= state.namespaces_of(os.getpid())

    def _ask_qemu(self) -> None:
        """Have libvirtd ask QEMU what it can do, and keep the answers: what a libvirtd has asked itself, it
        does not read from a file.
        """
        # `capabilities` asks for those of other processors too, as who looks at a host does.
        asked = [
            ["capabilities"],
            *(
                ["domcapabilities", "--virttype", self.virt, "--emulatorbin", path]
                for path in caches.EMULATORS
            ),
        ]
        for words in asked:
            self.hosts[0].run(["virsh", "-q", "-c", "qemu:///system", *words])
        asked_of = self.hosts[0]
        caches.keep_capabilities(asked_of.path("/var/cache/libvirt/qemu/capabilities"), asked_of.root)

    def down(self) -> None:
        """Take the lab away: processes, namespaces, mounts, control groups, files."""
        if self._ceph:
            self._ceph.hang_up()
        _end(self.folder, self._guard)
        self._guard = None

    def leftovers(self) -> list[str]:
        """List what there is of this lab on the machine; empty after `down()`."""
        return state.leftovers(self.id, self._namespaces)

    def __enter__(self) -> Lab:
        """Return the lab itself."""
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        """Take the lab down, also after an error or Ctrl-C."""
        self.down()

    # -- the drivers
    # ----------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Install the checkout's drivers into the front-end's remotes, over the stand-ins for the stock ones.

        The package is there already where another lab had the same one installed: to compile it takes longer
        than all the rest.
        """
        self.unpack()
        kept, package = caches.package(), self.fe.path(f"{REMOTES}/lib/semishared")
        # The byte code of another Python is of no use to this machine's.
        is_ours = self.fe.root == roots.MACHINE
        known = is_ours and kept.exists()
        if known:
            package.parent.mkdir(exist_ok=True)
            os.chown(package.parent, self.uid, self.gid)
            subprocess.run(["cp", "-a", "--", str(kept), str(package)], check=True)
        self.fe.run(["/opt/semishared/install.sh", "--remotes", REMOTES])
        if is_ours and not known:
            caches.keep_package(kept, package)
        self.sync()
        for node in self.front_ends[1:]:
            for path in (REMOTES, "/opt/semishared"):
                shutil.copytree(self.fe.path(path), node.path(path), symlinks=True, dirs_exist_ok=True)
                node.run(["chown", "-R", f"{layout.USER}:", path], user="root")

    def put(self) -> None:
        """Bring front-end and hosts what `install` has left in another lab with the same checkout; install
        where there was none.
        """
        if self.fe.root != roots.MACHINE:
            self.install()
            return
        kept = caches.installed()
        if not kept.exists():
            self.install()
            places = ((self.fe, "/opt/semishared"), (self.fe, REMOTES), (self.hosts[0], SCRIPTS))
            caches.keep_installed(kept, [node.path(path) for node, path in places])
            return

        def one(node: Node) -> None:
            is_front_end = node in self.front_ends
            names = ("0", "1") if is_front_end else ("2",)
            for name, path in zip(reversed(names), (node.path("/opt/remotes"), node.path("/opt/semishared"))):
                subprocess.run(["cp", "-a", "--", str(kept / name), str(path)], check=True)
            # /opt is in memory; the node's first process mounts it there, too, when it is started anew.
            target = REMOTES if is_front_end else SCRIPTS
            node.run(["sh", "-euc", 'mkdir -p "$0" && mount --bind /opt/remotes "$0"', target], user="root")

        _each(one, (*self.front_ends, *self.hosts))

    def unpack(self) -> None:
        """Bring the stand-ins for the stock scripts and a copy of the checkout to the front-end; install
        nothing.
        """
        uid, gid = self.uid, self.gid
        remotes = self.fe.path(REMOTES)
        stock = caches.HERE / "stock"
        if stock.is_dir():
            leave_out = shutil.ignore_patterns("README*", "__pycache__")
            shutil.copytree(stock, remotes, symlinks=True, dirs_exist_ok=True, ignore=leave_out)
        for folder, _, files in os.walk(remotes):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                os.chown(path, uid, gid, follow_symlinks=False)
        self.bring_checkout()

    def bring_checkout(self) -> None:
        """Bring a copy of the checkout to the front-end."""
        # A copy, because the checkout may be where oneadmin cannot read (below /root) and is not in the nodes
        # anyway.
        target = self.fe.path("/opt/semishared")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for part in caches.PARTS:
            source = caches.CHECKOUT / part
            if source.is_dir():
                shutil.copytree(
                    source, target / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
                )
            elif source.exists():
                shutil.copy2(source, target / part)
        self.fe.run(["chmod", "-R", "a+rX", "/opt/semishared"], user="root")

    def sync(self) -> None:
        """Bring the front-end's remotes to every host that is up, as `onehost sync --force` does."""

        def one(node: Node) -> None:
            target = f"{layout.USER}@{node.name}:{SCRIPTS}/"
            self.fe.run(["rsync", "-LRaz", "--delete", ".", target], cwd=REMOTES)

        _each(one, [node for node in self.hosts if node.up])


def _each(work: Callable[[Node], None], nodes: Iterable[Node]) -> None:
    with ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(work, nodes))


def _end(folder: Path, guard: Optional[subprocess.Popen[bytes]]) -> None:
    record = state.read(folder)
    if guard:
        guard.terminate()
        guard.wait()
        if guard.stdin:
            guard.stdin.close()
    elif state.alive(record.get("guard", 0), record.get("guard_start", "")):
        os.kill(record["guard"], signal.SIGTERM)
        deadline = time.monotonic() + 30.0
        while state.alive(record["guard"], record["guard_start"]) and time.monotonic() < deadline:
            time.sleep(0.02)
    state.remove(folder)
