# SPDX-License-Identifier: Apache-2.0
"""Feed recorded calls straight to our drivers in a lab, and check what is on disk afterwards.

Ids and host names are the recorded ones; the places of images are mapped to those our own `cp` and `mkfs`
chose. The API serves the recorded bodies. Domains are real but have no guest system: in its place the disks
are written and checked through the running QEMU, and by QEMU's block layer where no domain runs.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from typing import Any, Dict, List, Optional
from xml.etree import ElementTree

import traces
from lab.ceph import BRIDGE, POOL, READER, SECRET, USER
from lab.layout import HALT_XML
from lab.oned import ActionFailed, LabRunner, Rpc, Settings, Step
from lab.oned.core import Core
from replay.contents import (
    EMPTY,
    KIB64,
    UPLOADED,
    Content,
    Guest,
    check,
    check_files,
    check_on_ceph,
    place,
    upload,
)
from traces import Recording, body

_SOURCE = re.compile(r"/var/lib/one//datastores/\d+/[0-9a-f]{32}")
_MONITOR, _SECRET = "10.77.0.1:6791", "00000000-0000-4000-8000-0000000000cc"
_CEPH_USER = "<CEPH_USER><![CDATA[libvirt]]></CEPH_USER>"
_KEYS = f"<SEMISHARED_CEPH_READER>{READER}</SEMISHARED_CEPH_READER><SEMISHARED_CEPH_BRIDGE_USER>{BRIDGE}</SEMISHARED_CEPH_BRIDGE_USER>"  # noqa: E501


class Served:
    """An object of the API that is served as recorded."""

    def __init__(self, text: str) -> None:
        self.text = text

    def to_xml(self, only_last: bool = False) -> str:
        """Return the recorded body."""
        return self.text


class Player:
    """One lab in which recordings are played, one after the other."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        settings = Settings(front_end=lab.fe.name)
        self.core = Core(LabRunner(lab.fe, settings.environment, 120), settings)
        self.drivers = self.core.drivers
        self.rpc = Rpc(self.core, lab.fe.pid)
        self.sources: Dict[str, str] = {}  # recorded place of an image -> ours
        self.images: Dict[int, Content] = {}  # by image id: what is on it
        self.guests: Dict[int, Guest] = {}
        self.snapshots: Dict[str, Dict[int, Content]] = {}  # by source of the image, or by vm.disk
        self.backups: Dict[int, List[Dict[int, Content]]] = {}  # by VM: what each fetched backup must hold
        self.recording: Recording = {}

    def close(self) -> None:
        """Stop serving the API."""
        self.rpc.close()

    def prepare(self) -> None:
        """Make the files the recordings upload."""
        source = self.lab.fe.path("/var/tmp/olab-src.img")
        upload(source)
        source.chmod(0o644)
        words = [
            "qemu-img",
            "convert",
            "-f",
            "raw",
            "-O",
            "qcow2",
            "/var/tmp/olab-src.img",
            "/var/tmp/olab-src.qcow2",
        ]
        self.lab.fe.run(words, user="oneadmin")

    def play(self, name: str) -> None:
        """Play one recording; an AssertionError names step and call."""
        self.recording = traces.load(name)
        self._serve(self.recording["steps"][0])
        self._import_images()
        self._grow_images()
        for number, step in enumerate(self.recording["steps"], 1):
            for path, key in step["files"].items():
                if path.endswith("context.sh"):
                    self.core.runner.write(path, body(self.recording, key))
            if step["cmd"].startswith("onevm restore"):
                self._serve(step)  # what the driver asks for was made by the step before
            for call in step["calls"]:
                where = (
                    f"step {number} `{step['cmd']}` {call['kind']}/{call['action']} "
                    f"{' '.join(call['argv'])[:160]}"
                )
                try:
                    self._call(call)
                except (AssertionError, ActionFailed, OSError) as error:
                    raise AssertionError(f"{where}: {type(error).__name__} {error}") from error
            self._serve(step)

    def check_images(self) -> None:
        """Check every image where our drivers put it."""
        files, on_ceph = [], {}
        for image, content in self.images.items():
            served = ElementTree.fromstring(self.core.images[image].to_xml())
            path, format_ = served.findtext("SOURCE") or "", served.findtext("FORMAT") or "raw"
            if path.startswith(f"{POOL}/"):
                on_ceph[path] = content
            else:
                files.append((path, format_, content))
        check_files(self.lab.fe, files)
        check_on_ceph(self.lab.ceph, on_ceph)

    def left(self) -> List[str]:
        """List VM directories, leases, clones, and watchers of images on Ceph that are still there."""
        found = []
        for node in [self.lab.fe, *self.lab.hosts]:
            for store in (101, 103):
                directory = node.path(f"/var/lib/one/datastores/{store}")
                if directory.is_dir():
                    found += [
                        f"{node.name}:{store}/{p.name}" for p in directory.iterdir() if p.name != ".monitor"
                    ]
            for path in node.path("/var/lib/one/datastores/.semishared").glob("bases/*/leases/*"):
                found.append(f"{node.name}:{path.name}")
        store = self.lab.fe.path("/var/lib/one/datastores/100/.semishared")
        found += [str(path.name) for path in store.glob("*/clones/*")]
        for name, image in self.lab.ceph.images().items():
            if image["watchers"] or image["parent"]:
                found.append(f"{POOL}/{name}")
        return found

    # -- what the API serves ------------------------------------------------------------------------

    def mapped(self, text: str) -> str:
        """Put our places of images, and our Ceph, into a recorded text."""
        text = (
            text.replace("10.77.0.1:6789", _MONITOR)
            .replace(_MONITOR, self.lab.ceph.node.ip)
            .replace(_SECRET, SECRET)
        )
        text = text.replace(_CEPH_USER, _CEPH_USER.replace("libvirt", USER) + _KEYS)
        return _SOURCE.sub(lambda match: self.sources.get(match.group(), match.group()), text)

    def _serve(self, step: Dict[str, Any]) -> None:
        pools: Dict[str, Any] = {
            "vm": self.core.vms,
            "image": self.core.images,
            "datastore": self.core.datastores,
        }
        with self.core.data:
            for key, value in step["info_after"].items():
                kind, number = key.split(".")
                text = body(self.recording, value)
                if text.startswith("<"):
                    pools[kind][int(number)] = Served(self.mapped(text))
            known = pools["datastore"].get(101)
            if known is not None:
                pools["datastore"].setdefault(103, Served(known.text.replace("101", "103")))

    def _import_images(self) -> None:
        """Put images that a recording begins with, and none has uploaded, where they were."""
        for image, served in self.core.images.items():
            element = ElementTree.fromstring(served.to_xml())
            source = element.findtext("SOURCE") or ""
            if image in self.images or not source:
                continue
            if source.startswith(f"{POOL}/"):
                self.lab.fe.run(
                    ["rbd", "--id", BRIDGE, "import", "--no-progress", "/var/tmp/olab-src.img", source],
                    user="oneadmin",
                )
            elif (
                element.findtext("DATASTORE_ID") == "100"
                and not self.lab.fe.path(os.path.normpath(source)).exists()
            ):
                kind = "qcow2" if element.findtext("FORMAT") == "qcow2" else "img"
                self.lab.fe.run(
                    ["cp", f"/var/tmp/olab-src.{kind}", os.path.normpath(source)], user="oneadmin"
                )
            else:
                continue
            self.images[image] = dict(UPLOADED)

    def _grow_images(self) -> None:
        """Bring persistent raw images to the size the recording knows: other recordings had resized them."""
        for image, served in self.core.images.items():
            element = ElementTree.fromstring(served.to_xml())
            source, size = element.findtext("SOURCE") or "", int(element.findtext("SIZE") or "0") << 20
            if source.startswith("/") and element.findtext("FORMAT") == "raw" and image in self.images:
                path = self.lab.fe.path(os.path.normpath(source))
                if path.stat().st_size < size:
                    os.truncate(path, size)

    # -- calls --------------------------------------------------------------------------------------

    def _call(self, call: Dict[str, Any]) -> None:
        refused: Optional[ActionFailed] = None
        try:
            getattr(self, f"_{call['kind']}")(call)
        except ActionFailed as failure:
            refused = failure
        if refused is not None:
            # Where the recording shows a failure ours may refuse too, but by one clear line.
            assert call["rc"] != 0, f"failed: {refused}"
            assert 10 < len(str(refused)) < 400, f"not one clear line: {str(refused)!r}"

    def _datastore(self, call: Dict[str, Any]) -> None:
        if call["driver"] != "semishared":
            return  # another store of the recording machine
        text = self.mapped(body(self.recording, call["stdin"]))
        answer = self.drivers.datastore(
            call["driver"], call["action"], call["argv"][0], base64.b64encode(text.encode()).decode()
        ).split()
        recorded = call["stdout"].split()
        action, message = call["action"], ElementTree.fromstring(text)
        if action == "stat":
            assert answer == recorded
        elif action == "monitor":
            assert len(re.findall(r"(?:USED|TOTAL|FREE)_MB=\d+", " ".join(answer))) == 3
        elif action in ("cp", "mkfs", "clone") and recorded:
            assert len(answer) == len(recorded), f"answers {answer}, recorded {recorded}"
            assert answer[1:] == recorded[1:], f"format {answer}, recorded {recorded}"
            self.sources[recorded[0]] = answer[0]
            image = int(call["argv"][0])
            original = int(message.findtext("IMAGE/CLONING_ID") or "-1")
            fresh = {"cp": UPLOADED, "clone": self.images.get(original, {})}.get(action, EMPTY)
            if message.findtext("IMAGE/FORMAT") != "save_as":
                self.images[image] = dict(fresh)
                check(
                    self.lab.fe,
                    answer[0],
                    recorded[1] if recorded[1:] else self._format(message),
                    self.images[image],
                )
        elif action in ("snap_revert", "snap_delete"):
            source = os.path.normpath(message.findtext("IMAGE/SOURCE") or "")
            number = int(message.findtext("IMAGE/TARGET_SNAPSHOT") or "-1")
            if action == "snap_revert":
                content = self.images[int(call["argv"][0])]
                content.clear()
                content.update(self.snapshots[source][number])
                check(self.lab.fe, source, self._format(message), content)
            else:
                assert not self.lab.fe.path(f"{source}.snap/{number}").exists()
        elif action == "rm" and call["rc"] == 0:
            self.images.pop(int(call["argv"][0]), None)
            source = message.findtext("IMAGE/SOURCE") or ""
            assert not self.lab.fe.path(os.path.normpath(source)).exists(), f"{source} is still there"

    @staticmethod
    def _format(message: ElementTree.Element) -> str:
        return message.findtext("IMAGE/FORMAT") or "raw"

    def _tm(self, call: Dict[str, Any]) -> None:
        action, argv = call["action"], [self.mapped(word) for word in call["argv"]]
        if action == "monitor_ds":
            words = ["/var/tmp/one/tm/semishared/monitor_ds", *argv]
            said = self.lab.node(call["host"]).run(words, user="oneadmin").stdout.decode()
            assert all(line.startswith("VM = [") for line in said.splitlines()), said
            return
        vm = int(argv[1] if action == "restore" else argv[-2])
        with self.core.data:
            self.core.vms[vm] = Served(self.mapped(body(self.recording, call["vm_info"])))  # type: ignore[assignment]
        stdin = None
        if call.get("stdin"):
            stdin = self.mapped(body(self.recording, call["stdin"]))
            if "backup" not in action:
                stdin = base64.b64encode(stdin.encode()).decode()
        self.drivers.tm([action, call["driver"], *argv], stdin, any_driver=True)
        after = getattr(self, f"_after_{action}", None)
        if after is not None:
            after(self.guests.setdefault(vm, Guest(vm)), argv)

    def _vmm(self, call: Dict[str, Any]) -> None:
        """Run a hypervisor action with ours and the stand-ins; check and write disks as a guest would."""
        action, host, vm = call["action"], call["host"], int(call["argv"][-2])
        node, guest = self.lab.node(host), self.guests[vm]
        argv = [self._argument(word) for word in call["argv"][:-2]]
        stdin = self.mapped(body(self.recording, call["stdin"])).rstrip("\n")
        if action == "deploy":
            directory = os.path.dirname(argv[0])
            stdin = self._domain(stdin)
            before = [
                Step(("/bin/mkdir", "-p", directory)),
                Step(("/bin/cat", "-"), self.core.vms[vm].to_xml(), f"{directory}/vm.xml"),
                Step(("/bin/cat", "-"), self.core.datastores[101].to_xml(), f"{directory}/ds.xml"),
            ]
            domain = self.drivers.vmm(host, action, argv, vm, stdin, before).strip()
            assert domain in stdin, f"deploy answered {domain!r}"
            guest.boot(domain, self.core.vms[vm].to_xml())
            guest.check(node, directory)
            guest.write(node, directory)
            if call["rc"]:
                # There was no Ceph behind it: oned went on as with a VM that never ran.
                self.drivers.vmm(host, "cancel", [domain], vm, stdin)
                guest.running = ""
                guest.check(node, directory)
            return
        if action == "migrate":
            # That libvirt fails is played as a migration that never began.
            if call["rc"] == 0:
                guest.write(node, self._directory(vm, before=True))
                self.drivers.vmm(host, action, argv, vm, stdin)
            return
        directory = self._directory(vm)
        if action in ("cancel", "shutdown", "save", "reset", "detach_disk"):
            guest.check(node, directory)
            guest.write(node, directory)
        # There is no guest system that would react to ACPI, or let go of a disk: the system tests have one.
        if action != "detach_disk":
            self.drivers.vmm(host, "cancel" if action == "shutdown" else action, argv, vm, stdin)
        if action == "attach_disk":
            number = int(argv[1].rsplit(".", 1)[1])
            guest.targets[number] = argv[2]
            guest.check(node, directory)
            guest.write(node, directory, number)
        elif action == "resize_disk":
            record = guest.record(node, directory, int(argv[1]))
            self._size(node, record, int(argv[2]))
            guest.check(node, directory)
        elif action == "detach_disk":
            guest.disks.pop(int(argv[1].rsplit(".", 1)[1]), None)
        elif action in ("cancel", "shutdown", "save"):
            guest.running = ""
            guest.check(node, directory)
        elif action == "restore":
            guest.running = argv[2]
            guest.check(node, directory)
            guest.write(node, directory)

    def _argument(self, word: str) -> str:
        if not word.startswith("@base64:"):
            return self.mapped(word)
        text = self.mapped(body(self.recording, word[len("@base64:") :]))
        return base64.b64encode(text.encode()).decode()

    def _domain(self, xml: str) -> str:
        """Let the recorded domain start here: the lab's virtualisation, no kernel file of the other machine,
        nor a BIOS.
        """
        xml = re.sub(r"\s*<(kernel|initrd|cmdline)>.*?</\1>", "", xml)
        xml = xml if "<loader" in xml else xml.replace("<os>", f"<os>{HALT_XML}")
        return xml.replace("<domain type='qemu'", f"<domain type='{self.lab.virt}'")

    def _directory(self, vm: int, before: bool = False) -> str:
        """Return the VM's directory; `before` the migration that is under way."""
        served = ElementTree.fromstring(self.core.vms[vm].to_xml())
        return f"/var/lib/one/datastores/{served.findall('HISTORY_RECORDS/HISTORY')[-2 if before else -1].findtext('DS_ID')}/{vm}"  # noqa: E501

    # -- what must be true after an action ------------------------------------------------------------

    def _target(self, word: str) -> tuple[Any, str]:
        host, path = word.split(":", 1)
        return self.lab.node(host), os.path.normpath(path)

    def _disk(self, guest: Guest, word: str, content: Content) -> None:
        node, path = self._target(word)
        number = int(path.rsplit(".", 1)[1])
        guest.disks[number] = content
        record = guest.record(node, os.path.dirname(path), number)
        check(node, place(record), record["format"], content)

    def _image_of(self, guest: Guest, word: str) -> int:
        disk = ElementTree.fromstring(self.core.vms[guest.vm].to_xml()).find(
            f"TEMPLATE/DISK[DISK_ID='{word.rsplit('.', 1)[1]}']/IMAGE_ID"
        )
        assert disk is not None and disk.text is not None
        return int(disk.text)

    def _after_ln(self, guest: Guest, argv: List[str]) -> None:
        self._disk(guest, argv[1], self.images[self._image_of(guest, argv[1])])

    def _after_clone(self, guest: Guest, argv: List[str]) -> None:
        self._disk(guest, argv[1], dict(self.images[self._image_of(guest, argv[1])]))

    def _after_mkimage(self, guest: Guest, argv: List[str]) -> None:
        self._disk(guest, argv[2], {1 << 20: 0})

    def _after_mkswap(self, guest: Guest, argv: List[str]) -> None:
        self._disk(guest, argv[1], {(int(argv[0]) << 20) - KIB64: 0})

    def _after_context(self, _: Guest, argv: List[str]) -> None:
        node, path = self._target(argv[-3])
        data = node.path(path).read_bytes()
        assert data[0x8001:0x8006] == b"CD001" and data[0x8028:0x8030].strip() == b"CONTEXT"

    def _after_mvds(self, guest: Guest, argv: List[str]) -> None:
        self._gone(guest, argv[0])

    def _after_delete(self, guest: Guest, argv: List[str]) -> None:
        if "/disk." in argv[0]:
            self._gone(guest, argv[0])
        else:
            node, path = self._target(argv[0])
            assert not os.path.lexists(node.path(path)), f"{node.name}:{path} is still there"
            guest.disks.clear()

    def _gone(self, guest: Guest, word: str) -> None:
        node, path = self._target(word)
        assert not os.path.lexists(node.path(path)), f"{node.name}:{path} is still there"
        guest.disks.pop(int(path.rsplit(".", 1)[1]), None)

    def _after_mv(self, guest: Guest, argv: List[str]) -> None:
        if "/disk." in argv[0]:
            return
        (old, source), (new, target) = self._target(argv[0]), self._target(argv[1])
        assert not os.path.lexists(old.path(source)), f"{old.name}:{source} is still there"
        if new.name != self.lab.fe.name:
            guest.check(new, target)

    def _after_postmigrate(self, guest: Guest, argv: List[str]) -> None:
        node, path = self.lab.node(argv[1]), os.path.normpath(argv[2])
        guest.check(node, path)
        guest.write(node, path)
        self._only_in(guest, node, path)

    def _after_failmigrate(self, guest: Guest, argv: List[str]) -> None:
        node, path = self.lab.node(argv[0]), self._directory(guest.vm, before=True)
        guest.check(node, path)
        self._only_in(guest, node, path)

    def _only_in(self, guest: Guest, node: Any, path: str) -> None:
        for other in self.lab.hosts:
            for store in (101, 103):
                directory = f"/var/lib/one/datastores/{store}/{guest.vm}"
                is_there = os.path.lexists(other.path(directory))
                assert is_there == ((other.name, directory) == (node.name, path)), f"{other.name}:{directory}"

    def _place(self, guest: Guest, word: str) -> tuple[Any, Dict[str, Any], str]:
        """Return the node of a disk, its record, and the key of its snapshots: those of a disk in place are
        its image's.
        """
        node, path = self._target(word)
        number = int(path.rsplit(".", 1)[1])
        record = guest.record(node, os.path.dirname(path), number)
        own = f"{guest.vm}.{number}"
        return (
            node,
            record,
            os.path.normpath(record["image"]["source"]) if record["how"] == "in-place" else own,
        )

    def _after_snap_create(self, guest: Guest, argv: List[str]) -> None:
        node, record, key = self._place(guest, argv[0])
        content = guest.disks[int(argv[0].rsplit(".", 1)[1])]
        self.snapshots.setdefault(key, {})[int(argv[1])] = dict(content)
        guest.check(node, os.path.dirname(self._target(argv[0])[1]))
        if guest.running:
            guest.write(node, os.path.dirname(self._target(argv[0])[1]))
        elif record["how"] == "in-place":
            check(node, f"{record['image']['source']}.snap/{argv[1]}", record["format"], content)

    _after_snap_create_live = _after_snap_create

    def _after_snap_revert(self, guest: Guest, argv: List[str]) -> None:
        node, _, key = self._place(guest, argv[0])
        content = guest.disks[int(argv[0].rsplit(".", 1)[1])]
        content.clear()
        content.update(self.snapshots[key][int(argv[1])])
        guest.check(node, os.path.dirname(self._target(argv[0])[1]))

    def _after_snap_delete(self, guest: Guest, argv: List[str]) -> None:
        node, record, key = self._place(guest, argv[0])
        del self.snapshots[key][int(argv[1])]
        folder = f"{key}.snap" if record["how"] == "in-place" else os.path.dirname(record["path"])
        assert not os.path.lexists(node.path(f"{folder}/{argv[1]}")), f"{folder}/{argv[1]} is still there"
        guest.check(node, os.path.dirname(self._target(argv[0])[1]))

    def _after_resize(self, guest: Guest, argv: List[str]) -> None:
        node, record, _ = self._place(guest, argv[0])
        if not guest.running:
            self._size(node, record, int(argv[1]))

    @staticmethod
    def _size(node: Any, record: Dict[str, Any], mib: int) -> None:
        words = ["qemu-img", "info", "-U", "--output=json", "-f", record["format"], record["path"]]
        found = json.loads(node.run(words, user="oneadmin").stdout)["virtual-size"]
        assert found == mib << 20, f"{record['path']} has {found >> 20} MiB, not {mib}"

    def _after_cpds(self, guest: Guest, argv: List[str]) -> None:
        node, path = self._target(argv[0])
        number = int(path.rsplit(".", 1)[1])
        record = guest.record(node, os.path.dirname(path), number)
        words = ["qemu-img", "compare", "-U", "-f", record["format"], "-F", "raw", record["path"], argv[1]]
        assert b"identical" in node.run(words, user="oneadmin").stdout
        check(self.lab.fe, argv[1], "raw", guest.disks[number])

    # -- backup -------------------------------------------------------------------------------------

    def _after_prebackup(self, guest: Guest, argv: List[str]) -> None:
        """Fetch what is there as the rsync driver does, under the name the recorded backup has."""
        node, path = self._target(argv[0])
        made = self.backups.setdefault(guest.vm, [])
        made.append({int(number): dict(guest.disks[int(number)]) for number in argv[1].split(":")})
        names = sorted(os.listdir(node.path(f"{path}/backup")))
        assert names == [*(f"disk.{number}.0" for number in made[-1]), "vm.xml"], names
        assert b"<VM>" in base64.b64decode(node.path(f"{path}/backup/vm.xml").read_bytes())
        there = f"/var/lib/one/datastores/107/{guest.vm}/8e4cbd"
        shutil.rmtree(self.lab.fe.path(there), ignore_errors=True)
        self.lab.fe.run(["mkdir", "-p", os.path.dirname(there)], user="oneadmin")
        shutil.copytree(node.path(f"{path}/backup"), self.lab.fe.path(there))
        self.lab.fe.run(["chown", "-R", "oneadmin:", there], user="root")
        for number, content in made[-1].items():
            check(self.lab.fe, f"{there}/disk.{number}.0", "qcow2", content)
            backing = self.lab.fe.run(["qemu-img", "info", "-f", "qcow2", f"{there}/disk.{number}.0"]).stdout
            assert b"backing" not in backing, backing.decode()
        # The guest goes on writing: none of this may be in what was fetched.
        guest.write(node, path)

    _after_prebackup_live = _after_prebackup

    def _after_postbackup(self, guest: Guest, argv: List[str]) -> None:
        node, path = self._target(argv[0])
        left = [name for name in os.listdir(node.path(path)) if "backup" in name]
        assert not left, left
        guest.check(node, path)

    _after_postbackup_live = _after_postbackup

    def _after_restore(self, guest: Guest, argv: List[str]) -> None:
        node, path = self._target(argv[0])
        for number, content in self.backups.pop(guest.vm)[-1].items():
            assert guest.disks[number] != content
            # The same dictionary is what the image of a persistent disk must hold.
            guest.disks[number].clear()
            guest.disks[number].update(content)
        guest.check(node, path)
        shutil.rmtree(self.lab.fe.path("/var/lib/one/datastores/107"))
