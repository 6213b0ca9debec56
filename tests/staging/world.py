# SPDX-License-Identifier: Apache-2.0
"""A cloud whose base stores are looked at from outside, and the operator's commands run in it."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

from faults.rig import file_digest
from lab import Node
from lab.cloud import DATASTORES, RECORDS, STORE, SYSTEM, Cloud
from lab.guest import serial_xml
from rot import dated

MiB = 1 << 20
COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
PAUSED = "<!-- lab: paused -->"


class Staging:
    """The cloud, and what is in the base stores."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.lab = cloud.lab
        self.names = [host.name for host in cloud.lab.hosts]
        self._stored: Dict[Tuple[Any, ...], str] = {}

    @classmethod
    @contextmanager
    def up(cls, hosts: int) -> Iterator[Staging]:
        with Cloud.up(hosts=hosts) as cloud:
            yield cls(cloud)

    # -- commands ------------------------------------------------------------------------------------

    def command(self, *words: str, code: int = 0, timeout: float = 120) -> Any:
        """Run `semishared WORDS --json` as an operator does; return its JSON (a list, where it prints
        lines).
        """
        done = self.lab.fe.run([COMMAND, *words, "--json"], check=False, timeout=timeout)
        assert done.returncode == code, (
            words,
            done.returncode,
            done.stdout.decode()[-3000:],
            done.stderr.decode()[-3000:],
        )
        text = done.stdout.decode()
        try:
            return json.loads(text)
        except ValueError:
            return [json.loads(line) for line in text.splitlines()]

    def begin(self, *words: str) -> Run:
        """Start `semishared WORDS --json` and go on."""
        return Run(
            self.lab.fe.popen([COMMAND, *words, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )

    def image(self, name: str, mib: int = 64, data: int = 24, seed: int = 1, format: str = "raw") -> int:
        """Upload an image of `mib` MiB with `data` MiB of random content in extents of 4 MiB, and holes
        between them.
        """
        path = self.cloud.upload_file(f"{name}.img")
        dice = random.Random(f"{name} {seed}")
        pieces = data // 4
        with path.open("wb") as file:
            for piece in range(pieces):
                file.seek(piece * (mib // 4 // pieces) * 4 * MiB)
                file.write(dice.randbytes(4 * MiB))
            file.truncate(mib * MiB)
        return self.cloud._upload(name, format, "OS", False, {}, STORE)

    def deploy(self, name: str, image: int, host: str) -> int:
        """Deploy a VM that does not run: what counts is its disk."""
        template = self.cloud.template(name, [{"IMAGE_ID": str(image)}], MEMORY="32")
        template["RAW"] = {"TYPE": "kvm", "DATA": serial_xml(name) + PAUSED}
        del template["CONTEXT"]
        vm = self.cloud.oned.vm_create(template)
        self.cloud.oned.vm_deploy(vm, host, SYSTEM)
        return vm

    # -- what is there -------------------------------------------------------------------------------

    def root(self, host: str) -> Path:
        """Return a host's base store, seen from outside."""
        return self.lab.node(host).path(f"{DATASTORES}/{RECORDS}")

    def bases(self, host: str) -> List[Path]:
        """Return the bases of a host."""
        root = self.root(host) / "bases"
        return sorted(root.iterdir()) if root.is_dir() else []

    def stored(self, image: int) -> str:
        """Return the hash of the image on the store; what nobody has written to since is not read again for
        the next host.
        """
        path = self.lab.fe.path(self.cloud.source(image))
        stat = path.stat()
        key = (path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if key not in self._stored:
            self._stored = {key: file_digest(path)}
        return self._stored[key]

    def has(self, host: str, image: int) -> bool:
        """Tell whether a host has a base of the image that is, to the byte, the image."""
        found = [
            path
            for path in self.bases(host)
            if path.name.startswith(f"{STORE}-{image}-") and (path / "image").exists()
        ]
        return bool(found) and file_digest(found[0] / "image") == self.stored(image)

    def processes(self, *words: str) -> List[str]:
        """Return the command lines on any node that contain one of the words."""
        found = []
        for node in [self.lab.fe, *self.lab.hosts]:
            if not node.up:
                continue
            # Read, not asked of a `ps` on each node: who waits for the end of all looks five times a second.
            for entry in os.scandir(node.path("/proc")):
                line = command_line(Path(entry.path)) if entry.name.isdigit() else ""
                if any(word in line for word in words):
                    found.append(f"{node.name}: {entry.name} {line}")
        return found

    def leftovers(self) -> List[str]:
        """Return what no session may leave: staged files, partial bases, processes."""
        found = self.processes(
            "udp-sender", "udp-receiver", "hostside.py", "semishared stage", "zstd", "lzop"
        )
        for node in [self.lab.fe, *self.lab.hosts]:
            for name in self.cloud.files(node, f"{DATASTORES}/{RECORDS}"):
                if ".staged-" in name or name.startswith("staging/"):
                    found.append(f"{node.name}: {name}")
        return found

    def reset(self) -> None:
        """Remove all VMs and empty the base stores."""
        for node in self.lab.hosts:
            if not node.up:
                node.start()
            node.join()
            node.limit(None)
            node.drop("")
        self.cloud.delete_all()
        for node in [self.lab.fe, *self.lab.hosts]:
            # The rates of another test's peers among them.
            for part in ("bases", "staging", "holders"):
                shutil.rmtree(node.path(f"{DATASTORES}/{RECORDS}/{part}"), ignore_errors=True)


class Run:
    """A command under way, whose lines are read as they come."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.events: List[Dict[str, Any]] = []
        self._more = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with self._more:
                self.events.append(json.loads(line))
                self._more.notify_all()
        with self._more:
            self.events.append({"event": "end"})
            self._more.notify_all()

    def wait_for(self, fits: Callable[[Dict[str, Any]], bool], timeout: float = 60) -> Dict[str, Any]:
        """Return the first event that fits; fail when the command ends without one."""
        with self._more:
            deadline, seen = time.monotonic() + timeout, 0
            while True:
                for event in self.events[seen:]:
                    if fits(event):
                        return event
                    assert event["event"] != "end", self.events
                seen = len(self.events)
                assert self._more.wait(deadline - time.monotonic()), self.events

    def midway(self, source: str = "stream", host: str = "") -> Dict[str, Any]:
        """Wait until some of the image has come."""
        return self.wait_for(
            lambda e: e["event"] == "host"
            and e.get("source") == source
            and e["have"] > 1
            and host in ("", e["host"])
        )

    def summary(self, code: int = 0, timeout: float = 120) -> Dict[str, Any]:
        """Wait for the end and return the summary."""
        found = self.wait_for(lambda event: event["event"] == "summary", timeout)
        assert self.process.stderr
        assert self.process.wait(30) == code, (found, self.process.stderr.read())
        return found


def command_line(process: Path) -> str:
    """Return the words of a process, by its directory in a node's /proc; of a dead one its name, as ps has
    it; '' of one that is gone.
    """
    try:
        line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return line or f"[{(process / 'comm').read_text().strip()}]"
    except OSError:
        return ""


def flip(path: Path, at: int) -> None:
    """Change one bit at rest, as a failing disk does: neither size nor time change."""
    stat = path.stat()
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
        os.fsync(file.fileno())
    dated(path, stat)


def rows(answer: Dict[str, Any], key: str = "bases") -> Dict[str, Dict[str, Any]]:
    """Return the rows of a command's answer by host."""
    return {row["host"]: row for row in answer[key]}


def at(node: Node, words: Sequence[str]) -> None:
    """Run a command as root on a node."""
    node.run(list(words), user="root")
