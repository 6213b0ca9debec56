# SPDX-License-Identifier: Apache-2.0
"""Drive the simulated oned by the commands of a recording."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple
from xml.etree import ElementTree

from lab.oned import ActionFailed, Oned, Refused, Settings
from lab.oned.settings import CEPH
from lab.oned.states import STATE_NAMES
from lab.oned.template import Template, from_xml, scalar, vectors
from replay import recorder
from replay.seed import Seed, need, text
from traces import Recording, body

# oned.conf of the recording machine, as far as it shows.
DRIVERS = ("semishared", "semirbd")
SETTINGS = Settings(
    tm_drivers=DRIVERS,
    vm_mad="qemu",
    vmm_dir="kvm",
    domain_type="qemu",
    device_prefix="sd",
    guest_agent=True,
    inherit_image=("DISK_TYPE", "SEMI_TEST_IMG"),
    inherit_datastore=(*CEPH, "DISK_TYPE", "ALLOW_ORPHANS", "PERSISTENT_SNAPSHOTS", "SEMI_TEST_DS"),
)
RECOVERIES = ("--retry", "--success", "--failure", "--delete", "--recreate", "--force")


@dataclass
class Outcome:
    """What one command did in the simulated oned."""

    rc: int = 0
    output: str = ""
    calls: List[Dict[str, Any]] = field(default_factory=list)
    files: Dict[str, str] = field(default_factory=dict)
    info: Dict[str, str] = field(default_factory=dict)
    states: Dict[str, str] = field(default_factory=dict)


def generate(recording: Recording, root: Path) -> List[Outcome]:
    """Run every command of a recording; return what each did."""
    recorder.plant(root, ("h1", "h2"), DRIVERS)
    log = root / "calls.jsonl"
    with Oned.in_tree(root, SETTINGS) as oned:
        assert oned.runner.extra is not None  # type: ignore[attr-defined]
        oned.runner.extra.update(RECORDER_LOG=str(log), RECORDER_ROOT=str(root))  # type: ignore[attr-defined]
        oned.host_create("h1")
        oned.host_create("h2")
        Seed(recording, oned).plant()
        every = [call for step in recording["steps"] for call in step["calls"] if call["action"] != "monitor"]
        recorder.fail(
            log, {n: (call["rc"], _stderr(call), call["argv"]) for n, call in enumerate(every) if call["rc"]}
        )
        outcomes = []
        for number, step in enumerate(recording["steps"]):
            outcome, before = Outcome(), len(recorder.read(log))
            try:
                outcome.output = _Command(oned, recording, number).run(shlex.split(step["cmd"]))
            except Refused as refusal:
                outcome.rc, outcome.output = 255, str(refusal)
            except ActionFailed:
                outcome.output = step[
                    "output"
                ]  # the command itself succeeds, the object is in a failure state
            outcome.calls = recorder.read(log)[before:]
            for path in step["files"]:
                written = root / "fe" / path.lstrip("/")
                outcome.files[path] = written.read_text() if written.exists() else ""
            for key in step["info_after"]:
                outcome.info[key] = _info(oned, key)
            for vm_id in step["vm_states_after"]:
                vm = oned.vms.get(int(vm_id))
                outcome.states[vm_id] = f"{STATE_NAMES[vm.state]}/{vm.lcm}" if vm else "-"
            outcomes.append(outcome)
    return outcomes


def _stderr(call: Dict[str, Any]) -> str:
    # What was injected on the recording machine was noted before its escapes were read.
    text = str(call["stderr"])
    return text.replace("\\n", "\n") if call.get("injected_failure") else text


def _info(oned: Oned, key: str) -> str:
    kind, number = key.split(".")
    assert oned.rpc is not None
    reply = oned.rpc._reply(f"one.{kind}.info", (SETTINGS.session, int(number), False))
    return str(reply[1]) if reply[0] else f"ERROR one.{kind}.info({number},): {reply[1]}"


class _Command:
    """One recorded command line, on the simulated oned."""

    def __init__(self, oned: Oned, recording: Recording, number: int) -> None:
        self.oned = oned
        self.recording = recording
        self.number = number

    def run(self, words: List[str]) -> str:
        """Run a command; return what it would print."""
        flags = {
            word
            for word in words
            if word in ("--hard", "--live", "--poff", "--poff-hard", "--hold", "--persistent", *RECOVERIES)
        }
        options: Dict[str, str] = {}
        plain: List[str] = []
        rest = iter(words)
        for word in rest:
            if word in flags or word == "-a":
                continue
            if word.startswith("-"):
                options[word.lstrip("-")] = next(rest)
            else:
                plain.append(word)
        name = "_".join(plain[:2]).replace("-", "_")
        if plain == ["true"]:
            return ""
        return str(getattr(self, name)(plain[2:], options, flags) or "")

    def onevm_create(self, *_: Any) -> str:
        return f"ID: {self.oned.vm_create(self._vm_template())}"

    def onevm_deploy(self, plain: List[str], *_: Any) -> None:
        self.oned.vm_deploy(int(plain[0]), int(plain[1]), int(plain[2]))

    def onevm_hold(self, plain: List[str], *_: Any) -> None:
        self.oned.vm_hold(int(plain[0]))

    def onevm_terminate(self, plain: List[str], _: Any, flags: set[str]) -> None:
        self.oned.vm_terminate(int(plain[0]), "--hard" in flags)

    def onevm_poweroff(self, plain: List[str], _: Any, flags: set[str]) -> None:
        self.oned.vm_poweroff(int(plain[0]), "--hard" in flags)

    def onevm_reboot(self, plain: List[str], _: Any, flags: set[str]) -> None:
        self.oned.vm_reboot(int(plain[0]), "--hard" in flags)

    def onevm_undeploy(self, plain: List[str], _: Any, flags: set[str]) -> None:
        self.oned.vm_undeploy(int(plain[0]), "--hard" in flags)

    def onevm_suspend(self, plain: List[str], *_: Any) -> None:
        self.oned.vm_suspend(int(plain[0]))

    def onevm_stop(self, plain: List[str], *_: Any) -> None:
        self.oned.vm_stop(int(plain[0]))

    def onevm_resume(self, plain: List[str], *_: Any) -> None:
        self.oned.vm_resume(int(plain[0]))

    def onevm_migrate(self, plain: List[str], _: Any, flags: set[str]) -> None:
        how = {"--live": "live", "--poff": "poweroff", "--poff-hard": "poweroff-hard"}
        chosen = next((how[flag] for flag in flags if flag in how), "save")
        store = int(plain[2]) if len(plain) > 2 else None
        self.oned.vm_migrate(int(plain[0]), int(plain[1]), store, chosen)

    def onevm_recover(self, plain: List[str], _: Any, flags: set[str]) -> None:
        how = next(flag for flag in flags if flag in RECOVERIES)[2:]
        self.oned.vm_recover(int(plain[0]), how)
        if how == "recreate":
            # The recording machine's scheduler placed the VM anew: where, the record shows.
            served = body(self.recording, self._step()["info_after"][f"vm.{plain[0]}"])
            last = ElementTree.fromstring(served).findall("HISTORY_RECORDS/HISTORY")[-1]
            self.oned.vm_deploy(int(plain[0]), int(text(last, "HID")), int(text(last, "DS_ID")), True)

    def oneimage_enable(self, plain: List[str], *_: Any) -> None:
        self.oned.image_enable(int(plain[0]))

    def onevm_disk_attach(self, plain: List[str], options: Dict[str, str], _: Any) -> None:
        names = {"prefix": "DEV_PREFIX", "target": "TARGET", "cache": "CACHE"}
        given = {names[name]: value for name, value in options.items() if name in names}
        if "image" in options:
            self.oned.disk_attach(int(plain[0]), int(options["image"]), given)
        else:
            self.oned.disk_attach(int(plain[0]), None, self._volatile())

    def onevm_disk_detach(self, plain: List[str], *_: Any) -> None:
        self.oned.disk_detach(int(plain[0]), int(plain[1]))

    def onevm_disk_snapshot_create(self, plain: List[str], *_: Any) -> None:
        self.oned.disk_snapshot_create(int(plain[0]), int(plain[1]), plain[2])

    def onevm_disk_snapshot_revert(self, plain: List[str], *_: Any) -> None:
        self.oned.disk_snapshot_revert(*map(int, plain))

    def onevm_disk_snapshot_delete(self, plain: List[str], *_: Any) -> None:
        self.oned.disk_snapshot_delete(*map(int, plain))

    def onevm_disk_resize(self, plain: List[str], *_: Any) -> None:
        self.oned.disk_resize(*map(int, plain))

    def onevm_disk_saveas(self, plain: List[str], *_: Any) -> str:
        return f"Image ID: {self.oned.disk_saveas(int(plain[0]), int(plain[1]), plain[2])}"

    def onedatastore_create(self, *_: Any) -> str:
        # The template file was not recorded: the names and drivers are its own, the rest is oned's.
        created = f"datastore.{self._step()['output'].split()[-1]}"
        element = ElementTree.fromstring(body(self.recording, self._step()["info_after"][created]))
        names = {name: text(element, name) for name in ("NAME", "DS_MAD", "TM_MAD")}
        return f"ID: {self.oned.datastore_create({**names, 'TYPE': 'IMAGE_DS'})}"

    def onedatastore_delete(self, plain: List[str], *_: Any) -> None:
        self.oned.datastore_delete(int(plain[0]))

    def oneimage_create(self, _: Any, options: Dict[str, str], flags: set[str]) -> str:
        number = self.oned.image_create(
            int(options["d"]),
            options["name"],
            options.get("path", ""),
            int(options.get("size", "0")),
            options["type"],
            options["format"],
            "--persistent" in flags,
            options.get("prefix", ""),
        )
        return f"ID: {number}"

    def oneimage_update(self, plain: List[str], *_: Any) -> None:
        # The attributes came from a file that was not recorded; the image shows them afterwards.
        served = body(self.recording, self._step()["info_after"][f"image.{plain[0]}"])
        self.oned.image_update(int(plain[0]), from_xml(need(ElementTree.fromstring(served), "TEMPLATE")))

    def oneimage_clone(self, plain: List[str], options: Dict[str, str], _: Any) -> str:
        return f"ID: {self.oned.image_clone(int(plain[0]), plain[1], int(options['d']))}"

    def oneimage_persistent(self, plain: List[str], *_: Any) -> None:
        self.oned.image_persistent(int(plain[0]), True)

    def oneimage_nonpersistent(self, plain: List[str], *_: Any) -> None:
        self.oned.image_persistent(int(plain[0]), False)

    def oneimage_delete(self, plain: List[str], *_: Any) -> None:
        self.oned.image_delete(int(plain[0]))

    def oneimage_snapshot_revert(self, plain: List[str], *_: Any) -> None:
        self.oned.image_snapshot(int(plain[0]), "snap_revert", int(plain[1]))

    def oneimage_snapshot_delete(self, plain: List[str], *_: Any) -> None:
        self.oned.image_snapshot(int(plain[0]), "snap_delete", int(plain[1]))

    # -- inputs that were files on the recording machine --------------------------------------------

    def _step(self) -> Dict[str, Any]:
        step: Dict[str, Any] = self.recording["steps"][self.number]
        return step

    def _vm_template(self) -> Template:
        """Reconstruct the user's VM template: of each disk only what a user gives."""
        created = f"vm.{self._step()['output'].split()[-1]}"
        element = ElementTree.fromstring(body(self.recording, self._step()["info_after"][created]))
        template: Template = {"NAME": text(element, "NAME"), **from_xml(need(element, "USER_TEMPLATE"))}
        served = from_xml(need(element, "TEMPLATE"))
        for name in ("CPU", "MEMORY", "FEATURES", "RAW", "TM_MAD_SYSTEM"):
            if name in served:
                template[name] = served[name]
        template["OS"] = {k: v for k, v in vectors(served, "OS")[0].items() if k != "UUID"}
        for context in vectors(served, "CONTEXT"):
            template["CONTEXT"] = {k: context[k] for k in ("NETWORK", "SET_HOSTNAME")}
        template["DISK"] = [self._disk(disk) for disk in element.findall("TEMPLATE/DISK")]
        return template

    def _disk(self, element: ElementTree.Element) -> Dict[str, str]:
        if element.find("IMAGE_ID") is not None:
            names: Tuple[str, ...] = ("IMAGE_ID", "SEMI_DISK_ATTR")
            image = self.oned.image(int(text(element, "IMAGE_ID")))
            holders = image.template, self.oned.datastore(image.datastore_id).template
            inherited = next((scalar(holder, "DISK_TYPE") for holder in holders if "DISK_TYPE" in holder), "")
            if text(element, "DISK_TYPE") != inherited and not text(element, "TM_MAD_SYSTEM"):
                names += ("DISK_TYPE",)  # it can only come from the user
        else:
            names = ("TYPE", "SIZE", "FORMAT", "DEV_PREFIX")
        return {name: text(element, name) for name in names if element.find(name) is not None}

    def _volatile(self) -> Dict[str, str]:
        """Reconstruct the volatile disk of a disk-attach from the disk it became."""
        known: Optional[ElementTree.Element] = None
        for call in self._step()["calls"]:
            served = body(self.recording, call.get("vm_info") or "")
            if served:
                known = ElementTree.fromstring(served).find("TEMPLATE/DISK[ATTACH='YES']")
        assert known is not None
        return self._disk(known)


def plain_message(text: str) -> str:
    """Drop the `[one.vm.action]` mark of an API message."""
    return re.sub(r"^\[one\.[a-z.]+\] ", "", text.strip())
