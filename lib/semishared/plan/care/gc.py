# SPDX-License-Identifier: Apache-2.0
"""What is left over: everything of ours on the machines against what oned knows.

    on a machine (hosts and front-end)                    left over if
      <system>/<vm>/ .incoming-<vm>-* .outgoing-<vm>-*    oned does not know the VM, no domain here is it or
      uses a file of it
      <system>/<vm>/ of a known VM                        oned has it elsewhere, it is there, and nothing is
      under way (plan/care/gc_places.py)
      <system>/.incoming-<vm>-* of a known VM             nobody writes it any more
      <system>/.removed-<vm>-*                            always: the removal of the VM's directory had begun
      <system>/.kept-<vm>-*                               somebody names it: what was not committed to an
      image (disk/retained_diffs.py)
      bases/*/leases/VM-DISK                              neither the VM's disk nor a staged one is in any
      system datastore here
      bases/<store>-<image>-<generation>                  oned does not know the image, and nobody has a lease
      staging/*                                           nobody holds its lock
      .staged-*                                           the process that it names is gone, and none here has
      it open
      a domain                                            never: said, if oned does not know its VM and its
      files were deleted
      on a device, without a link that leads there        its VM, if it is of one, is not known to oned
      locks/vm-<vm>, locks/incoming-<vm>-*                two days old, VM unknown: it keeps the time of the
      VM's deletion
    on a store
      .semishared/NAME/clones/VM-DISK-CLOUD[.snap]        oned does not know the VM, and it is this cloud's
      .semishared/NAME/                                   NAME is not there, no image of oned has that SOURCE,
      no clone in it
                                                          that is another cloud's, or might be
      .semishared/.uploads/NAME/                          nobody holds its lock
      .semishared/.epochs/VM-SEQ-CLOUD                    oned does not know the VM, it is this cloud's, and
      all machines were asked
      .staged-*, NAME.snap                                as above; no process of any machine has it open, or
      is named by it

A clone without CLOUD, of 0.1.0 or of a store on Ceph, is this cloud's if oned remembers the VM, and that its
disk was made from that image. What is of a VM newer than any that oned has ever had is kept: an older state
of oned's database was restored.

All of it only when older than `older_than` seconds. The facts were collected before oned was asked, so
whatever was there then, and is not known to oned, will not be known to it later: ids are not used twice. What
looks like ours but might be the only copy of data is *kept* and said, not removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterator, Mapping

from ...model import steps as s
from ...model.base import names as base_names
from ...model.disk import names as disk_names
from ...model.store import dir_names
from . import gc_places

LOCK_S = 2 * 86400
"""No action runs that long (disk/vm_dir.py); not shortened by --now, as a lock says what must not be
published any more.
"""


@dataclass(frozen=True)
class Known:
    """What oned knows."""

    vms: dict[int, str]
    """VMs that are not DONE, and the host of each."""
    images: frozenset[tuple[int, int]]
    """(store, image)"""
    sources: frozenset[str]
    stored: frozenset[str] = frozenset()
    """SOURCEs that are no paths: POOL/IMAGE."""
    idle: frozenset[str] = frozenset()
    """Those of them that no VM has."""
    cloud: str = ""
    """This cloud's id, '' if it has none yet."""
    newest_vm: int = 1 << 62
    """The highest id that any VM of oned has had."""
    past: frozenset[tuple[int, int, str]] = frozenset()
    """(vm, disk, SOURCE) of VMs that are DONE, as far as somebody has asked."""
    places: Mapping[int, gc_places.Place] = field(default_factory=dict)
    """Where the files of VMs are, as far as somebody has asked."""
    born: Mapping[int, int] = field(default_factory=dict)
    """When each image was made (REGTIME)."""
    discarded: frozenset[str] = frozenset()
    """Names of directories of kept disks that nobody wants any more: the administrator has said so."""

    def why_not(self, vm: int) -> str:
        """Return why a VM that oned does not know might be one all the same, '' if it is not."""
        return (
            ""
            if vm <= self.newest_vm
            else f"VM {vm} is newer than any that oned has had: was an older database restored?"
        )

    def whose(self, vm: int, disk: int, source: str, cloud: str) -> str:
        """Return why a clone on a store might be another cloud's, '' if it is this one's."""
        if cloud:
            return "" if cloud == self.cloud else f"it is cloud {cloud}'s"
        return (
            ""
            if (vm, disk, source) in self.past
            else "it might be another cloud's: oned does not remember that disk"
        )


@dataclass(frozen=True)
class Machine:
    """A machine and what it reported (host/leftovers.py)."""

    name: str
    location: str
    facts: dict[str, Any] = field(hash=False)
    libvirt: bool = True
    is_near: bool = True  # VMs of ours may run there


@dataclass(frozen=True)
class Finding:
    """One thing that is left over; `keep` says why it is not removed all the same."""

    machine: str
    location: str
    kind: str
    path: str
    reason: str
    bytes: int
    age: int
    seen: str = ""
    vm: int = -1
    keep: str = ""
    libvirt: bool = True
    """Its machine runs domains."""
    image: s.ImageRef | None = None
    """It is an image in a pool, or the snapshot of one whose id was `seen`."""

    def steps(self) -> list[s.Step]:
        """Return what removes it on its machine."""
        if self.image:
            from ...model.store import image_steps

            if self.seen:
                return [image_steps.DropSnapshot(self.image, int(self.seen))]
            return [image_steps.RemoveImage(self.image)]
        if self.kind == "vm":
            guard: list[s.Step] = [s.CheckNotRunning(f"one-{self.vm}")] if self.libvirt else []
            return [*guard, s.RemoveVm(self.vm, self.path)]
        return [s.Discard(self.kind, self.path, self.location, self.vm, self.seen)]


class _Everywhere:
    """What some machine has in use; paths of stores are the same on all of them."""

    def __init__(self, machines: list[Machine], all_seen: bool) -> None:
        self.open = gc_places.Paths(
            path
            for machine in machines
            for path in (*machine.facts["open"], *gc_places.living(machine.facts))
        )
        domains = [machine.facts["domains"] for machine in machines]
        self.all_seen = all_seen and not any(
            machine.is_near and "error" in machine.facts["domains"] for machine in machines
        )
        self.domains = {name for found in domains for name in found.get("names", ())}
        self.files = gc_places.Paths(path for found in domains for path in found.get("files", ()))
        found = (
            (machine.name, item)
            for machine in machines
            for item in machine.facts["vms"]
            if item["kind"] == "dir"
        )
        self.directories = {(name, item["system"], item["vm"]): item for name, item in found}


def find(machines: list[Machine], known: Known, older_than: int, all_seen: bool) -> list[Finding]:
    """Return what is left over on `machines`; `all_seen` is False if a machine could not be asked."""
    everywhere = _Everywhere(machines, all_seen)
    found = [item for machine in machines for item in _OnMachine(machine, known, everywhere).findings()]
    limits = {"lock": LOCK_S, "kept": 0, "domain": 0}
    return [item for item in found if item.age >= limits.get(item.kind, older_than)]


class _OnMachine:
    def __init__(self, machine: Machine, known: Known, everywhere: _Everywhere) -> None:
        self.machine, self.known, self.everywhere = machine, known, everywhere
        self.files = gc_places.Paths(machine.facts["domains"].get("files", ()))
        self.entries: dict[int, list[str]] = {}
        for item in machine.facts["vms"]:
            self.entries.setdefault(item["vm"], []).extend(item["entries"])

    def findings(self) -> Iterator[Finding]:
        facts = self.machine.facts
        yield from self._vms(facts)
        yield from self._root(facts["root"])
        for vm, path, why, keep in gc_places.orphans(facts, self.machine.location):
            if vm not in self.known.vms and not self.known.why_not(vm):
                yield self._finding("domain", {"path": path, "age": 0}, why, vm, keep)
        for item in facts.get("unlinked", ()):
            why = self.known.why_not(item["vm"]) or self._runs_here(item["vm"], item["path"])
            keep = (
                "" if item.get("replaced") else gc_places.why_unlinked_stays(item["vm"], self.known.vms, why)
            )
            reason = (
                "a move to another device left it"
                if item.get("replaced")
                else "its device was away when it was removed"
            )
            yield self._finding("unlinked", item, reason, item["vm"], keep)
        yield from (
            self._finding("staged", item, "a killed action left it")
            for item in facts["staged"]
            if self._is_idle(item)
        )
        for store in facts["stores"]:
            yield from self._store(store)

    def _finding(self, kind: str, item: dict[str, Any], reason: str, vm: int = -1, keep: str = "") -> Finding:
        return Finding(
            self.machine.name,
            self.machine.location,
            kind,
            item["path"],
            reason,
            int(item.get("bytes", 0)),
            int(item["age"]),
            str(item.get("seen", "")),
            vm,
            keep,
            self.machine.libvirt,
        )

    def _is_idle(self, item: dict[str, Any]) -> bool:
        return not self.everywhere.open.has(item["path"])

    def _runs_here(self, vm: int, path: str) -> str:
        """Return why a VM's directory may be in use by a domain of this machine, '' if it is not."""
        domains = self.machine.facts["domains"]
        if "error" in domains:
            return f"libvirt cannot be asked: {domains['error']}"
        if f"one-{vm}" in domains["names"]:
            return f"domain one-{vm} is there"
        if self.files.has(path):
            return "a domain uses its files"
        return ""

    def _runs_anywhere(self, clone: dict[str, Any]) -> str:
        """Return why a clone on the store may be in use by a domain of any machine, '' if it is not."""
        everywhere = self.everywhere
        if f"one-{clone['vm']}" in everywhere.domains or everywhere.files.has(clone["path"]):
            return "a domain uses it"
        return "" if everywhere.all_seen else "a host that cannot be asked may be running its VM"

    def _vms(self, facts: dict[str, Any]) -> Iterator[Finding]:
        published = {(item["system"], item["vm"]) for item in facts["vms"] if item["kind"] == "dir"}
        for item in facts["vms"]:
            vm, kind = item["vm"], item["kind"]
            if kind == "kept" and any(map(disk_names.is_of_disks, item["entries"])):
                yield self._finding(
                    kind,
                    item,
                    f"a persistent disk of VM {vm} was deleted before it was committed",
                    vm,
                    self._kept(item),
                )
                continue
            if kind == "kept":
                kind = "removed"  # its disks were committed, or never came
            if kind == "removed":
                yield self._finding(kind, item, f"a killed removal of VM {vm} left it", vm)
                continue
            if vm not in self.known.vms:
                keep = self.known.why_not(vm) or self._runs_here(vm, item["path"])
                keep = keep or ("" if self._is_idle(item) else "somebody writes to it")
                reason = f"VM {vm} is not known to oned"
                # The directory's removal takes the two others and the leases with it.
                if kind == "dir" or (item["system"], vm) not in published:
                    yield self._finding("vm" if kind == "dir" else kind, item, reason, vm, keep)
                continue
            place = self.known.places.get(vm)
            if (
                kind == "dir"
                and place
                and (self.machine.name, item["system"]) != (place.machine, place.system)
            ):
                home = self.everywhere.directories.get((place.machine, place.system, vm))
                keep = gc_places.why_kept(item, home, place) or self._runs_here(vm, item["path"])
                keep = keep or ("" if self._is_idle(item) else "somebody writes to it")
                yield self._finding("stray", item, f"oned has VM {vm} on {place.machine}", vm, keep)
                continue
            if kind == "incoming" and self._is_idle(item):
                yield self._finding(kind, item, f"a killed move of VM {vm} left it", vm)
            if kind == "outgoing":
                # Set aside by a move that died before its own directory took the place: the only one there
                # is.
                keep = (
                    ""
                    if (item["system"], vm) in published
                    else f"it may be the only directory of VM {vm}; retry its move"
                )
                yield self._finding(kind, item, f"a killed move of VM {vm} left it", vm, keep)
            for staged in item["staged"]:
                if self._is_idle(staged):
                    yield self._finding("staged", staged, f"a killed action of VM {vm} left it", vm)

    def _kept(self, item: dict[str, Any]) -> str:
        name = item["path"].rpartition("/")[2]
        word = (
            name if disk_names.beside_named(name) else "NAME"
        )  # it is to be copied, and a host has named it
        return (
            ""
            if name in self.known.discarded
            else f"semishared commit {item['vm']}, or semishared gc --discard {word}"
        )

    def _root(self, root: dict[str, Any]) -> Iterator[Finding]:
        for base in root["bases"]:
            said = base_names.named(base["name"])
            for lease in base["leases"]:
                if not self._uses(lease["vm"], lease["disk"]):
                    where = self.known.vms.get(lease["vm"])
                    reason = (
                        f"VM {lease['vm']} is {'not known to oned' if where is None else 'not here'}: "
                        f"no disk uses it"
                    )
                    yield self._finding("lease", {**lease, "bytes": 0}, reason, lease["vm"])
            for item in filter(self._is_idle, base["staged"]):
                yield self._finding("staged", item, "a killed action left it")
            if said and not base["leases"] and (said.store, said.image) not in self.known.images:
                yield self._finding("base", base, f"image {said.image} is not known to oned")
        for item in root["staging"]:
            if not item["held"]:
                yield self._finding("staging", item, "nobody is making this base")
        for item in root["locks"]:
            if item["vm"] not in self.known.vms:
                yield self._finding("lock", item, f"VM {item['vm']} is not known to oned", item["vm"])

    def _uses(self, vm: int, disk: int) -> bool:
        """Tell whether a disk of a VM is here, or staged here, or may be in what is not mounted."""
        return bool(self.machine.facts.get("is_away")) or any(
            disk_names.is_of_disk(entry, disk) for entry in self.entries.get(vm, ())
        )

    def _foreign(self, store: str, side: dict[str, Any], clone: dict[str, Any]) -> str:
        return self.known.whose(clone["vm"], clone["disk"], f"{store}/{side['name']}", clone["cloud"])

    def _store(self, store: dict[str, Any]) -> Iterator[Finding]:
        path = store["path"]
        uploads = {item["name"] for item in store["uploads"] if item["held"]}
        unseen = "" if self.everywhere.all_seen else "a host that cannot be asked may be writing it"
        for side in store["sides"]:
            for clone in side["clones"]:
                if clone["vm"] in self.known.vms:
                    continue
                foreign = self._foreign(path, side, clone)
                if foreign and clone["cloud"]:
                    continue  # nothing of ours, whatever it is
                keep = foreign or self.known.why_not(clone["vm"]) or self._runs_anywhere(clone)
                yield self._finding("clone", clone, f"VM {clone['vm']} is not known to oned", -1, keep)
            is_gone = not side["image"] and f"{path}/{side['name']}" not in self.known.sources
            if is_gone and dir_names.is_image(side["name"]) and side["name"] not in uploads:
                held = any(
                    c["vm"] in self.known.vms or self._foreign(path, side, c) or self.known.why_not(c["vm"])
                    for c in side["clones"]
                )
                keep = "it holds clones of VMs" if held else ""
                yield self._finding(
                    "side", side, f"image {side['name']} is not there and not known to oned", -1, keep
                )
        for item in store["uploads"]:
            if not item["held"]:
                yield self._finding("upload", item, "nobody holds this upload")
        for item in store["epochs"]:
            if (
                item["vm"] not in self.known.vms
                and item["cloud"] == self.known.cloud
                and not self.known.why_not(item["vm"])
                and not unseen
            ):
                yield self._finding("epoch", item, f"VM {item['vm']} is not known to oned")
        for item in store["staged"]:
            if self._is_idle(item):
                yield self._finding("staged", item, "a killed action left it", -1, unseen)
        images = {item["name"] for item in store["images"]}
        for item in store["images"]:
            name, is_snap = disk_names.disk_of(item["name"]), disk_names.are_layers(item["name"])
            if not dir_names.is_image(name) or f"{path}/{name}" in self.known.sources or name in uploads:
                continue
            if is_snap and name not in images:
                yield self._finding(
                    "snapshots", item, f"image {name} is not there and not known to oned", -1, unseen
                )
            elif not is_snap:
                keep = "it may hold somebody's data: register it again, or remove it by hand"
                yield self._finding("image", item, "no image of oned has this SOURCE", -1, keep)
