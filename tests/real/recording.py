# SPDX-License-Identifier: Apache-2.0
"""Record what a real oned asks of drivers, and what they leave, in the form of tests/traces."""

from __future__ import annotations

import hashlib
import json
import lzma
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence
from xml.etree import ElementTree

import traces
from lab.oned import Refused
from lab.oned.states import STATE_NAMES
from real import planted
from real.conftest import RealCloud
from real.front_end import REMOTES

QUIET = (
    "du",
    "info",
    "ls",
    "df",
    "pool-info",
    "domstate",
    "dumpxml",
    "list",
    "dominfo",
    "domstats",
    "nodeinfo",
)
"""Commands, and options before them, of monitoring and of looks: not those of a backup."""


class Recorder:
    """Notes the steps of one scenario."""

    def __init__(self, cloud: RealCloud, drivers: Sequence[str], folder: Path) -> None:
        self.cloud, self.folder = cloud, folder
        planted.before_drivers(cloud.lab.fe, REMOTES, drivers)
        self.nodes = [cloud.lab.fe, *cloud.lab.hosts]
        planted.before_commands(self.nodes)
        self.begin("", "")

    def begin(self, scenario: str, description: str) -> None:
        """Begin a scenario."""
        self.scenario, self.description = scenario, description
        self.bodies: Dict[str, str] = {}
        self.steps: List[Dict[str, Any]] = []
        self.vm, self.images, self.datastores = -1, [], []  # type: ignore[var-annotated]

    def _body(self, text: str) -> str:
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.bodies[key] = text
        return key

    def _state(self, vm: int) -> str:
        state, lcm = self.cloud.oned.state(vm)
        return f"{state}/{lcm}"

    @contextmanager
    def step(self, command: str) -> Iterator[Dict[str, Any]]:
        """Note what is called and run inside the block, which waits until it has ended."""
        logs = [node.path(planted.COMMANDS) for node in self.nodes]
        calls = self.cloud.lab.fe.path(planted.LOG)
        sizes = [path.stat().st_size for path in logs]
        size = calls.stat().st_size
        step: Dict[str, Any] = {"cmd": command, "rc": 0, "output": ""}
        began = time.monotonic()
        try:
            yield step
        except Exception as error:
            step.update(rc=1, output=str(error))
            raise
        finally:
            step["seconds"] = round(time.monotonic() - began, 2)
            step["vm_states_after"] = {str(self.vm): self._state(self.vm)} if self.vm >= 0 else {}
            step["calls"] = [self._call(line) for line in calls.read_bytes()[size:].decode().splitlines()]
            step["calls"].sort(key=lambda call: call["t"])
            step["commands"] = sorted(
                (
                    row
                    for node, path, begin in zip(self.nodes, logs, sizes)
                    for row in self._commands(node.name, path.read_bytes()[begin:].decode(errors="replace"))
                ),
                key=lambda row: row["t"],
            )
            step["store"] = self._stores()
            step["info_after"] = self._info()
            self.steps.append(step)
            self._save()

    def _call(self, line: str) -> Dict[str, Any]:
        call: Dict[str, Any] = json.loads(line)
        for key in ("stderr", "ppid_cmd"):
            call[key] = call[key].replace(f"{call['action']}.real", call["action"])
        text = call.pop("stdin")
        call["stdin_len"] = len(text)
        if text:
            call["stdin"] = self._body(text)
        return call

    @staticmethod
    def _commands(node: str, text: str) -> Iterator[Dict[str, Any]]:
        for row in text.split("\x1e"):
            when, *words = row.split("\x1f")[:-1] or [""]
            if words and not set(words[1:6]) & set(QUIET):
                yield {"host": node, "t": float(when), "argv": words}

    def _stores(self) -> Dict[str, Any]:
        """Return what lies in backup datastores, by datastore."""
        found = {}
        for number in self.datastores:
            base = f"/var/lib/one/datastores/{number}"
            done = self.cloud.lab.fe.run(["/usr/bin/python3", "-ISB", planted.LOOK, base], check=False)
            found[str(number)] = json.loads(done.stdout)["files"] if not done.returncode else {}
        return found

    def _info(self) -> Dict[str, str]:
        api, found = self.cloud.oned.api, {}
        if self.vm >= 0:
            xml = ElementTree.fromstring(api.call("vm.info", self.vm))
            for name in ("MONITORING", "LAST_POLL"):
                for row in xml.findall(name):
                    xml.remove(row)
            found[f"vm.{self.vm}"] = self._body(ElementTree.tostring(xml, encoding="unicode"))
            for row in xml.findall("BACKUPS/BACKUP_IDS/ID"):
                self.images.append(int(row.text or 0))
        for image in sorted(set(self.images)):
            try:
                found[f"image.{image}"] = self._body(api.call("image.info", image))
            except Refused as refused:  # it is deleted
                found[f"image.{image}"] = self._body(str(refused))
        for number in self.datastores:
            found[f"datastore.{number}"] = self._body(api.call("datastore.info", number))
        return found

    def _save(self) -> None:
        """Write the scenario as far as it is."""
        version = self.cloud.one.version
        meta = {
            "opennebula": version,
            "scenario": self.scenario,
            "description": self.description,
            "recorded": time.strftime("%Y-%m-%d"),
            "hosts": {"fe": "frontend (oned)", "h1": "host id 0"},
            "notes": "calls[].stdin and info_after values are keys of bodies; calls[].left: what was on the "
            "host right after the call; store: what lay in backup datastores after the step; commands: what "
            "drivers ran, but for ssh and looks; guest: sums of the disks at a backup; exact: if what "
            "is restored has them",
            "states": {str(number): name for number, name in STATE_NAMES.items()},
        }
        recording = {"meta": meta, "steps": self.steps, "bodies": self.bodies}
        path = self.folder / f"{self.scenario}.json.xz"
        self.folder.mkdir(parents=True, exist_ok=True)
        with lzma.open(path, "wt", encoding="utf-8", preset=9) as stream:
            json.dump(recording, stream, indent=0, sort_keys=True)


def default_folder(version: str) -> Path:
    """Return where the recordings of a version are kept: 7.4/increments."""
    return traces.HERE / ".".join(version.split(".")[:2]) / "increments"
