# SPDX-License-Identifier: Apache-2.0
"""Be one machine of the lab: run programs in it, reach its files, cut its power or its cable."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Optional, Union

import schemas
from lab import caches, cgroups, layout, roots, state

HERE = Path(__file__).resolve().parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOOT_SECONDS = 60.0


@cache
def _enter() -> Path:
    return caches.build([HERE / "enter.c"], ["-static"])


class NodeProcess(subprocess.Popen):  # type: ignore[type-arg]
    """A process inside a node; signals go to all of it, not only to what waits for it outside."""

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process and its children (its process group)."""
        if self.poll() is None:
            try:
                os.killpg(self.pid, sig)
            except ProcessLookupError:
                pass


@dataclass(frozen=True)
class Site:
    """Say what all nodes of a lab have in common."""

    folder: Path
    keeper: int
    stores: Sequence[int]
    kvm: bool
    sharedfs: str

    @property
    def lab_id(self) -> str:
        """Return the id of the lab."""
        return self.folder.name


class Node:
    """One machine of the lab, up or down; its disks outlive its power."""

    def __init__(self, site: Site, name: str, ip: str, root: Path = roots.MACHINE) -> None:
        """Describe the node, whose programs are those of `root`; `start()` powers it on."""
        self.site = site
        self.root = root
        self.name = name
        self.ip = ip
        self.folder = site.folder / "nodes" / name
        self._parent: Optional[subprocess.Popen[bytes]] = None
        self._core: Optional[int] = None

    def __repr__(self) -> str:
        """Name the node for test output."""
        return f"<Node {self.name} {self.ip} {'up' if self.up else 'down'}>"

    # -- power and cable
    # ------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Return the pid of the node's first process as seen from outside; an error when it is down."""
        pid, start = self._identity()
        if not state.alive(pid, start):
            raise RuntimeError(f"{self.name} is down")
        return pid

    @property
    def up(self) -> bool:
        """Tell whether the node has power."""
        return state.alive(*self._identity())

    def _identity(self) -> tuple[int, str]:
        try:
            pid, start = (self.folder / "init").read_text().split()
        except (OSError, ValueError):
            return 0, ""
        return int(pid), start

    def start(self) -> None:
        """Power the node on and wait until its services answer."""
        if self.up:
            return
        site = self.site
        files = cgroups.create(site.lab_id, self.name)
        v1 = [known.controllers for known in cgroups.hierarchies() if known.controllers]
        env = {
            "PATH": PATH,
            "LAB_NAME": self.name,
            "LAB_ADDRESS": self.ip,
            "LAB_STORES": " ".join(str(store) for store in site.stores),
            "LAB_SHARE": str(site.folder / "stores"),
            "LAB_CGROUPS": " ".join(v1) if files else "",
            "LAB_UNIFIED": "yes" if files and not v1 else "",
            "LAB_KVM": "yes" if site.kvm else "no",
            "LAB_SHAREDFS": site.sharedfs,
            "LAB_ROOT": "" if self.root == roots.MACHINE else str(self.root),
            "LAB_REACH": os.environ.get("MUTANTS_FOLDER", ""),
        }
        # The shell puts itself into the node's control groups first: the cgroup namespace starts from there.
        join = 'for f in $LAB_GROUPS; do echo 0 >"$f" || exit; done; exec "$@"'
        env["LAB_GROUPS"] = " ".join(str(path) for path in files)
        words = ["nsenter", "-t", str(site.keeper), "-p", "-n", "--"]
        words += [
            "bash",
            "-c",
            join,
            "join",
            "unshare",
            "--mount",
            "--uts",
            "--ipc",
            "--cgroup",
            "--pid",
            "--net",
            "--fork",
        ]
        words += ["--propagation", "private", "bash", str(HERE / "node-init.sh"), str(self.folder)]
        log = (self.folder / "boot.log").open("ab")
        self._parent = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, start_new_session=True
        )
        log.close()
        assert self._parent.stdin
        assert self._parent.stdout
        try:
            line = self._parent.stdout.readline()
            if not line:
                raise RuntimeError(
                    f"{self.name} did not start: {(self.folder / 'boot.log').read_text()[-2000:]}"
                )
            pid = int(line)
            (self.folder / "init").write_text(f"{pid} {state.started(pid)}")
            cgroups.release_parent(site.lab_id, state.parent(pid))
            # The same hardware address after each start, as a machine has: the others keep it in their ARP
            # tables.
            card = "02:00:" + ":".join(f"{int(part):02x}" for part in self.ip.split("."))
            self._switch(
                f"link add {self.name} type veth peer name eth0 address {card} netns {pid}",
                f"link set {self.name} master br0 up",
            )
            self._parent.stdin.write(b"go\n")
            self._parent.stdin.close()
            if not self._parent.stdout.readline():
                raise RuntimeError(f"{self.name} did not come up: see {self.folder}/var/log/node.log")
        finally:
            self._parent.stdout.close()

    def _switched(self, *words: str) -> str:
        """Return what `ip` says of the switch."""
        outside = ["nsenter", "-t", str(self.site.keeper), "-n", "--", "ip", *words]
        return subprocess.run(outside, check=True, capture_output=True, text=True).stdout

    def _switch(self, *lines: str) -> None:
        words = ["nsenter", "-t", str(self.site.keeper), "-n", "--", "ip", "-batch", "-"]
        done = subprocess.run(words, input="\n".join(lines).encode(), capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"cannot wire {self.name}: {done.stderr.decode().strip()}")

    def kill(self) -> None:
        """Cut the power: everything in the node dies at once, its disks stay."""
        pid, start = self._identity()
        if not state.kill(pid, start):
            raise RuntimeError(f"{self.name} (pid {pid}) does not die")
        if self._parent:
            self._parent.wait(timeout=20)
            self._parent = None

    def add_card(self, address: str) -> None:
        """Give the node a second card, eth1, on a switch that has no other cards than such, until its power
        is cut.
        """
        if "br1" not in self._switched("link", "show", "type", "bridge"):
            self._switch("link add br1 type bridge mcast_snooping 0 stp_state 0 forward_delay 0")
            self._switch("link set br1 up")
        self._switch(
            f"link add {self.name}-1 type veth peer name eth1 netns {self.pid}",
            f"link set {self.name}-1 master br1 up",
        )
        for words in (f"addr add {address}/24 brd + dev eth1", "link set eth1 up"):
            self.run(["ip", *words.split()], user="root")

    def remove_card(self) -> None:
        """Take the second card out again."""
        self._switch(f"link del {self.name}-1")

    def carried(self, card: str) -> int:
        """Return the bytes that a card has sent and received."""
        counts = self.path(f"/sys/class/net/{card}/statistics")
        return sum(int((counts / name).read_text()) for name in ("rx_bytes", "tx_bytes"))

    def cut(self) -> None:
        """Pull the network cable at the switch."""
        self._switch(f"link set {self.name} down")

    def join(self) -> None:
        """Plug the network cable in again."""
        self._switch(f"link set {self.name} up")

    def limit(self, mbit: Optional[float]) -> None:
        """Give the cable a speed, both ways, in Mbit/s; None for as fast as it goes."""
        outside = ["nsenter", "-t", str(self.site.keeper), "-n", "--"]
        inside = ["nsenter", "-t", str(self.pid), "-n", "--"]
        for words, device in ((outside, self.name), (inside, "eth0")):
            change = ["tc", "qdisc", "del", "dev", device, "root"]
            if mbit is not None:
                change = ["tc", "qdisc", "replace", "dev", device, "root", "tbf"]
                change += ["rate", f"{int(mbit * 1000)}kbit", "burst", "256kb", "latency", "100ms"]
            done = subprocess.run([*words, *change], capture_output=True, check=False)
            if done.returncode and mbit is not None:
                raise RuntimeError(f"cannot limit {self.name}: {done.stderr.decode().strip()}")

    def stay_on(self, core: int) -> None:
        """Let all that runs in the node, until it is killed, and what its card receives, use this core of the
        machine only.

        Hosts do not share their cores: without this each packet for many nodes wakes them on other cores than
        it is on.
        """
        network = os.readlink(f"/proc/{self.pid}/ns/net")
        for entry in os.scandir("/proc"):
            try:
                if entry.name.isdigit() and os.readlink(f"{entry.path}/ns/net") == network:
                    for task in os.listdir(f"{entry.path}/task"):
                        os.sched_setaffinity(int(task), {core})
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has ended meanwhile, or is none of ours
        self.path("/sys/class/net/eth0/queues/rx-0/rps_cpus").write_text(f"{1 << core:x}")
        self._core = core

    def drop(self, rule: str) -> None:
        """Lose what comes in and fits an nft rule: `udp dport 9000-9300`, `numgen random mod 1000 < 10`; ''
        loses nothing.
        """
        inside = ["nsenter", "-t", str(self.pid), "-n", "--"]
        text = "table netdev lab { }\ndelete table netdev lab\n"
        if rule:
            text += (
                f"table netdev lab {{ chain in {{ type filter hook ingress device eth0 priority 0; "
                f"{rule} drop; }}; }}\n"
            )
        done = subprocess.run(
            [*inside, "nft", "-f", "-"], input=text.encode(), capture_output=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"cannot drop at {self.name}: {done.stderr.decode().strip()}")

    # -- programs and files
    # ---------------------------------------------------------------------------------------

    def path(self, inside: Union[str, Path]) -> Path:
        """Return where a file of the node is reached from outside, also while the node is down (its disks
        only).

        Absolute symbolic links on the way are resolved outside: do not `resolve()` such a path.
        """
        inside = Path(inside)
        if not inside.is_absolute():
            raise ValueError(f"not an absolute path: {inside}")
        if self.up:
            return Path(f"/proc/{self.pid}/root{inside}")
        for store in self.site.stores:
            top = Path(f"/var/lib/one/datastores/{store}")
            if inside == top or top in inside.parents:
                return self.site.folder / "stores" / str(store) / inside.relative_to(top)
        if inside.parts[1] not in layout.MINE:
            raise RuntimeError(f"{self.name} is down and {inside} is not on its disks")
        return self.folder / inside.relative_to("/")

    def _command(
        self, argv: Sequence[Union[str, Path]], user: str, env: Optional[Mapping[str, str]], cwd: str
    ) -> tuple[list[str], dict[str, str]]:
        home = "/root" if user == "root" else "/var/lib/one" if user == layout.USER else "/"
        full: dict[str, str] = {"PATH": PATH, "HOME": home, "USER": user, "LOGNAME": user, "LANG": "C.UTF-8"}
        full.update(env or {})
        words = ["taskset", "-c", str(self._core)] if self._core is not None else []
        return [*words, str(_enter()), str(self.pid), user, cwd, *(str(word) for word in argv)], full

    def popen(
        self,
        argv: Sequence[Union[str, Path]],
        user: str = layout.USER,
        env: Optional[Mapping[str, str]] = None,
        cwd: str = "/var/lib/one",
        **popen_kwargs: Any,
    ) -> NodeProcess:
        """Start a program in the node, as `user`, with a clean environment plus `env`."""
        words, full = self._command(argv, user, env, cwd)
        popen_kwargs.setdefault("start_new_session", True)
        # A pipe belongs to whoever made it, and opening /dev/stdin or /dev/stderr anew asks for that: without
        # this the program could not, as it can below the real oned.
        uid = self.uid_of(user)
        mine = {}
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            if popen_kwargs.get(name) == subprocess.PIPE:
                ends = os.pipe()
                os.fchown(ends[0], uid, -1)
                popen_kwargs[name] = ends[min(number, 1)]
                mine[name] = ends
        try:
            process = NodeProcess(words, env=full, **popen_kwargs)
        except BaseException:
            for ends in mine.values():
                os.close(ends[0])
                os.close(ends[1])
            raise
        text = any(popen_kwargs.get(name) for name in ("text", "universal_newlines", "encoding"))
        for name, (reading, writing) in mine.items():
            theirs, ours = (reading, writing) if name == "stdin" else (writing, reading)
            os.close(theirs)
            kind = ("w" if name == "stdin" else "r") + ("" if text else "b")
            setattr(process, name, os.fdopen(ours, kind, encoding="utf-8" if text else None))
        return process

    def uid_of(self, user: str) -> int:
        """Return a user's uid in the node."""
        for line in (self.folder / "etc/passwd").read_text().splitlines():
            fields = line.split(":")
            if fields[0] == user:
                return int(fields[2])
        raise KeyError(f"{self.name} has no user {user}")

    def run(
        self,
        argv: Sequence[Union[str, Path]],
        user: str = layout.USER,
        input: bytes = b"",
        env: Optional[Mapping[str, str]] = None,
        cwd: str = "/var/lib/one",
        check: bool = True,
        timeout: Optional[float] = 60,
        stdout: Union[int, IO[bytes]] = subprocess.PIPE,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a program in the node to its end; with `check` a failure is an error that shows its stderr."""
        process = self.popen(
            argv, user, env, cwd, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE
        )
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            raise
        done = subprocess.CompletedProcess([str(word) for word in argv], process.returncode, out, err)
        if check and process.returncode:
            raise NodeError(self.name, done)
        schemas.check(argv, out or b"")
        return done

    def wait_for(self, argv: Sequence[str], timeout: float, user: str = layout.USER) -> None:
        """Repeat a command until it succeeds."""
        deadline = time.monotonic() + timeout
        while self.run(argv, user=user, check=False, timeout=timeout).returncode:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: not in {timeout} s: {' '.join(argv)}")
            time.sleep(0.1)


class NodeError(subprocess.CalledProcessError):
    """A program in a node failed; says where and why."""

    def __init__(self, node: str, done: subprocess.CompletedProcess[bytes]) -> None:
        """Keep the node's name beside what failed."""
        super().__init__(done.returncode, done.args, done.stdout, done.stderr)
        self.node = node

    def __str__(self) -> str:
        """Show the command, its exit code and the end of its stderr."""
        text = (self.stderr or b"").decode(errors="replace").strip()
        return f"{self.node}: {' '.join(self.cmd)} ended with {self.returncode}: {text[-2000:]}"
