# SPDX-License-Identifier: Apache-2.0
"""Decide what is left over: our files, images and domains on machines that oned does not know.

A clone without CLOUD (of 0.1.0, or of a store on Ceph) is this cloud's if oned remembers that the VM's disk
was made from that image. Anything of a VM newer than all that oned has ever had is kept: an older state of
oned's database was restored.

All of it must be older than `older_than` seconds. The facts were collected before oned was asked: what was
there then, and is not known to oned, will not be known to it later, as ids are not used twice. What looks
like ours but might be the only copy of data is *kept* and reported, not removed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Iterable, Iterator, Mapping

from ...model import steps as s
from ...model.base import names as base_names
from ...model.disk import names as disk_names
from ...model.leftover_steps import (
    BaseStore,
    Discard,
    Seen,
    SeenClone,
    SeenMachine,
    SeenSide,
    SeenStore,
    SeenVm,
    Unlinked,
)
from ...model.store import dir_names
from ...named import NamedTuple
from . import gc_places

CATALOGUE = """
vm: `<system>/<vm>/`, with its leases
    -> oned does not know the VM (or it is DONE), and no domain of that host is it or uses a file in it
stray: `<system>/<vm>/` of a VM that oned has elsewhere: on the host of its last record, or, stopped or
    undeployed, on the front-end
    -> nothing is under way with the VM (running, powered off, suspended, stopped, undeployed; looked at again
    before the removal), where it belongs there is another directory with all of its disks that is not older
    by the SEQ of the VM's history, and no domain of that host is it. It goes with the leases that it held
removed: `<system>/.removed-<vm>-*`
    -> always: a killed removal
kept: `<system>/.kept-VM-*`
    -> `--discard` names it: a disk of a persistent image that was deleted before it was
    [committed](../explanation/persistent-local.md)
incoming: `<system>/.incoming-<vm>-*`
    -> the VM is unknown, or no process writes it: a killed move
outgoing: `<system>/.outgoing-<vm>-*`
    -> the same; kept if it is the only directory of a known VM
lease: `bases/*/leases/VM-DISK`
    -> the VM's disk is not on that host, not staged either
base: `bases/<store>-<image>-<generation>/`
    -> oned does not know the image, and no disk has a lease
staging: `staging/<store>-<image>/`
    -> its lock is free
staged: `.staged-*` on hosts and stores
    -> no process has it open
lock: `locks/vm-<vm>`
    -> the VM is unknown, and the lock is two days old, also with `--now`
clone: `<store>/.semishared/NAME/clones/VM-DISK-CLOUD`, `.snap`
    -> it is this cloud's, oned does not know the VM, no domain of any host uses it, and all hosts were asked
side: `<store>/.semishared/NAME/`
    -> the image NAME is neither there nor known to oned
upload: `<store>/.semishared/.uploads/NAME/`
    -> its lock is free
epoch: `<store>/.semishared/.epochs/VM-SEQ-CLOUD`
    -> it is this cloud's, oned does not know the VM, and all hosts were asked
snapshots: `<store>/NAME.snap`
    -> the image NAME is neither there nor known to oned
image: `<store>/NAME`
    -> never removed: listed as kept if no image of oned has this SOURCE
staged: `POOL/one-I.semishared-<x>`
    -> no client has it open
share: `SEMISHARED_FS_ROOT/share-I`
    -> oned does not know the image, and the share is not ready: a killed action left it. One that is ready is
    listed as kept
key: `SEMISHARED_FS_ROOT/.semishared/.keys/I-VM.json`, `I-VM-ro.json`
    -> oned does not know the VM: the key of Ceph that it had for a share goes
changing: `POOL/one-I.semishared-changing`
    -> never removed: the next action on the image puts back what it was
clone: `POOL/one-I-VM-DISK`
    -> made by us, this cloud's, oned does not know the VM, no client has it open and no clone depends on it
image: `POOL/one-I`
    -> never removed: listed as kept if it was made by us and no image of oned has this SOURCE
unlinked: `<device>/layers/NAME`, `<device>/bases/NAME`, to which no link leads
    -> oned does not know the VM whose layers they are; a base: always
domain: a domain whose files were deleted
    -> never removed: listed as kept if oned does not know its VM
snapshot: `POOL/one-I@semishared-undo`, `-saved`, `-old-<x>`
    -> the change is over, no image is being made of which it might be the source, and no clone depends on it
lent: `POOL/one-I@semishared-lent-<id>`
    -> no VM of oned has the image, and no client has it open
mark: `POOL/one-I@semishared-backup-VM-<x>`
    -> oned does not know the VM, for whose backups it was made
"""
"""`kind: what it is -> when it is left over`; docs/reference/cli.md has the rows as a table."""
LOCK_S = 2 * 86400
"""No action runs that long (disk/vm_dir.py).

--now does not shorten it: a lock names what must not be published any more.
"""
LEAST_S = {"lock": LOCK_S, "kept": 0, "domain": 0, "share": 0, "key": 0}
"""Kind -> its least age in seconds, whatever the command asks for."""


class Kind(NamedTuple):
    """What may be left over, and when it is."""

    name: str
    what: str
    left_over_if: str


def kinds(text: str) -> list[Kind]:
    """Return the rows of a catalogue."""
    rows = [" ".join(row.split()) for row in re.split(r"\n(?=\S)", text.strip())]
    parts = [re.split(": | -> ", row, maxsplit=1) for row in rows]
    return [Kind(name, *rest.rsplit(" -> ", 1)) for name, rest in parts]


KINDS = kinds(CATALOGUE)


@dataclass(frozen=True)
class Known:
    """oned's objects."""

    vms: dict[int, str]
    """VMs that are not DONE, and the host of each."""
    images: frozenset[tuple[int, int]]
    """(store, image)"""
    sources: frozenset[str]
    stored: frozenset[str] = frozenset()
    """SOURCEs of images on Ceph: POOL/IMAGE."""
    idle: frozenset[str] = frozenset()
    """Those of them that no VM has."""
    cloud: str = ""
    """This cloud's id, '' if it has none yet."""
    newest_vm: int = 1 << 62
    """The highest id that any VM of oned has had."""
    past: frozenset[tuple[int, int, str]] = frozenset()
    """(vm, disk, SOURCE) of VMs that are DONE, as far as oned was asked."""
    places: Mapping[int, gc_places.Place] = field(default_factory=dict)
    """Where the files of VMs are, as far as oned was asked."""
    born: Mapping[int, int] = field(default_factory=dict)
    """When each image was made (REGTIME)."""
    discarded: frozenset[str] = frozenset()
    """Names of the directories of kept disks that the administrator has discarded."""
    cloned: frozenset[int] = frozenset()
    """Images that are not persistent: nothing is committed to them."""
    holders: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """The VMs that have an image."""

    def why_not(self, vm: int) -> str:
        """Return why a VM that oned does not know may exist all the same, '' if it does not."""
        newer = f"VM {vm} is newer than any that oned has had: was an older database restored?"
        return "" if vm <= self.newest_vm else newer

    def whose(self, vm: int, disk: int, source: str, cloud: str) -> str:
        """Return why a clone on a store might be another cloud's, '' if it is this one's."""
        if cloud:
            return "" if cloud == self.cloud else f"it is cloud {cloud}'s"
        is_past = (vm, disk, source) in self.past
        return "" if is_past else "it might be another cloud's: oned does not remember that disk"


@dataclass(frozen=True)
class Machine:
    """A machine and what it reported (host/leftovers.py)."""

    name: str
    location: str
    facts: SeenMachine = field(hash=False)
    libvirt: bool = True
    is_near: bool = True  # VMs of ours may run there


@dataclass(frozen=True)
class Finding:
    """One thing that is left over; `keep` says why gc does not remove it all the same."""

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
    """Whether its machine runs domains."""
    image: s.ImageRef | None = None
    """The image, if it is in a pool, or has a snapshot there."""
    step: s.Step | None = None
    """The step that removes it, if it is outside the machine's own directories."""

    def steps(self) -> list[s.Step]:
        """Return the steps that remove it on its machine."""
        if not self.location:
            return [self.step] if self.step else []
        if self.kind == "vm":
            guard: list[s.Step] = [s.CheckNotRunning(f"one-{self.vm}")] if self.libvirt else []
            return [*guard, s.RemoveVm(self.vm, self.path)]
        return [Discard(self.kind, self.path, self.location, self.vm, self.seen)]


class _Everywhere:
    """What machines have in use; paths of stores are the same on all of them."""

    def __init__(self, machines: list[Machine], all_seen: bool) -> None:
        self.open = gc_places.Paths(
            path for machine in machines for path in (*machine.facts.open, *gc_places.living(machine.facts))
        )
        domains = [machine.facts.domains for machine in machines]
        self.all_seen = all_seen and not any(
            machine.is_near and machine.facts.domains.error for machine in machines
        )
        self.domains = {name for found in domains for name in found.names}
        self.files = gc_places.Paths(path for found in domains for path in found.files)
        items = ((machine.name, item) for machine in machines for item in machine.facts.vms)
        self.directories = {(name, item.system, item.vm): item for name, item in items if item.kind == "dir"}


def _number(entry: str) -> int:
    """Return the number of the disk of which a directory entry is, -1 if it is of none."""
    number = disk_names.disk_named(disk_names.disk_of(entry))
    return -1 if number is None else number


def find(machines: list[Machine], known: Known, older_than: int, all_seen: bool) -> list[Finding]:
    """Return what is left over on `machines`; `all_seen` is False if a machine could not be asked."""
    return aged(of_any_age(machines, known, all_seen), older_than)[0]


def of_any_age(machines: list[Machine], known: Known, all_seen: bool) -> list[Finding]:
    """Return the same, also what an action that is under way may be making."""
    everywhere = _Everywhere(machines, all_seen)
    return [item for machine in machines for item in _OnMachine(machine, known, everywhere).findings()]


def aged(found: Iterable[Finding], older_than: int) -> tuple[list[Finding], list[Finding]]:
    """Return what is old enough, and of what is younger what will go, by its age.

    Locks are not said to be young: each VM that ends leaves one, for two days.
    """
    old, young = [], []
    for item in found:
        if item.age >= LEAST_S.get(item.kind, older_than):
            old.append(item)
        elif not item.keep and item.kind != "lock":
            young.append(item)
    return old, young


class _OnMachine:
    def __init__(self, machine: Machine, known: Known, everywhere: _Everywhere) -> None:
        self.machine, self.known, self.everywhere = machine, known, everywhere
        self.files = gc_places.Paths(machine.facts.domains.files)
        self.entries: dict[int, list[str]] = {}
        for item in machine.facts.vms:
            self.entries.setdefault(item.vm, []).extend(item.entries)

    def findings(self) -> Iterator[Finding]:
        facts = self.machine.facts
        yield from self._vms(facts.vms)
        yield from self._root(facts.root)
        for vm, path, why, keep in gc_places.orphans(facts, self.machine.location):
            if vm not in self.known.vms and not self.known.why_not(vm):
                yield self._finding("domain", Seen(path, "", 0, 0), why, vm, keep)
        for item in facts.unlinked:
            yield self._unlinked(item)
        for staged in filter(self._is_idle, facts.staged):
            yield self._finding("staged", staged, "a killed action left it")
        for store in facts.stores:
            yield from self._store(store)

    def _finding(self, kind: str, item: Seen, reason: str, vm: int = -1, keep: str = "") -> Finding:
        return Finding(
            self.machine.name,
            self.machine.location,
            kind,
            item.path,
            reason,
            item.bytes,
            item.age,
            item.seen,
            vm,
            keep,
            self.machine.libvirt,
        )

    def _unlinked(self, item: Unlinked) -> Finding:
        if item.replaced:
            return self._finding("unlinked", item, "a move to another device left it", item.vm)
        why = self.known.why_not(item.vm) or self._runs_here(item.vm, item.path)
        keep = gc_places.why_unlinked_stays(item.vm, self.known.vms, why)
        return self._finding("unlinked", item, "its device was away when it was removed", item.vm, keep)

    def _is_idle(self, item: Seen) -> bool:
        return not self.everywhere.open.has(item.path)

    def _runs_here(self, vm: int, path: str) -> str:
        """Return why a VM's directory may be in use by a domain of this machine, '' if it is not."""
        domains = self.machine.facts.domains
        if domains.error:
            return f"libvirt cannot be asked: {domains.error}"
        if f"one-{vm}" in domains.names:
            return f"domain one-{vm} is there"
        if self.files.has(path):
            return "a domain uses its files"
        return ""

    def _runs_anywhere(self, clone: SeenClone) -> str:
        """Return why a clone on the store may be in use by a domain of any machine, '' if it is not."""
        everywhere = self.everywhere
        if f"one-{clone.vm}" in everywhere.domains or everywhere.files.has(clone.path):
            return "a domain uses it"
        return "" if everywhere.all_seen else "a host that cannot be asked may be running its VM"

    def _vms(self, items: list[SeenVm]) -> Iterator[Finding]:
        published = {(item.system, item.vm) for item in items if item.kind == "dir"}
        for item in items:
            vm, kind = item.vm, item.kind
            if kind == "kept" and any(map(disk_names.is_of_disks, item.entries)):
                reason = f"a persistent disk of VM {vm} was deleted before it was committed"
                yield self._finding(kind, item, reason, vm, self._kept(item))
                continue
            if kind == "kept":
                kind = "removed"  # its disks were committed, or never came
            if kind == "removed":
                yield self._finding(kind, item, f"a killed removal of VM {vm} left it", vm)
                continue
            if vm not in self.known.vms:
                keep = self.known.why_not(vm) or self._runs_here(vm, item.path)
                keep = keep or ("" if self._is_idle(item) else "somebody writes to it")
                reason = f"VM {vm} is not known to oned"
                # The directory's removal takes the two others and the leases with it.
                if kind == "dir" or (item.system, vm) not in published:
                    yield self._finding("vm" if kind == "dir" else kind, item, reason, vm, keep)
                continue
            place = self.known.places.get(vm)
            here = (self.machine.name, item.system)
            if kind == "dir" and place and here != (place.machine, place.system):
                home = self.everywhere.directories.get((place.machine, place.system, vm))
                keep = gc_places.why_kept(item, home, place) or self._runs_here(vm, item.path)
                keep = keep or ("" if self._is_idle(item) else "somebody writes to it")
                yield self._finding("stray", item, f"oned has VM {vm} on {place.machine}", vm, keep)
                continue
            if kind == "incoming" and self._is_idle(item):
                yield self._finding(kind, item, f"a killed move of VM {vm} left it", vm)
            if kind == "outgoing":
                # A move that died before its directory took the place has set this one aside: it is the only
                # one.
                only = f"it may be the only directory of VM {vm}; retry its move"
                keep = "" if (item.system, vm) in published else only
                yield self._finding(kind, item, f"a killed move of VM {vm} left it", vm, keep)
            for staged in item.staged:
                if self._is_idle(staged):
                    yield self._finding("staged", staged, f"a killed action of VM {vm} left it", vm)

    def _kept(self, item: SeenVm) -> str:
        """Return why a kept disk stays: the command that commits it, where oned lets that be, and others."""
        name = item.path.rpartition("/")[2]
        if name in self.known.discarded:
            return ""
        word = name if disk_names.beside_named(name) else "NAME"  # it is to be copied, a host has named it
        discard = f"or semishared gc --discard {word}"
        for disk in sorted(map(_number, filter(disk_names.is_of_disks, item.entries))):
            why = self._closed(item.vm, disk)
            if why:
                return f"{why}: semishared commit {item.vm} {disk} --as-new-image NEW, {discard}"
        had = "if another VM has had its image since, semishared commit {} DISK --as-new-image NEW"
        return f"semishared commit {item.vm}; {had.format(item.vm)}; {discard}"

    def _closed(self, vm: int, disk: int) -> str:
        """Return why a kept disk is not committed to its image, '' if oned says nothing against it."""
        for base in self.machine.facts.root.bases:
            said = base_names.named(base.name)
            # Its lease, which a kept disk has, tells its image.
            if said and any((lease.vm, lease.disk) == (vm, disk) for lease in base.leases):
                others = self.known.holders.get(said.image, frozenset()) - {vm}
                if (said.store, said.image) not in self.known.images:
                    return f"oned has no image {said.image} any more"
                if said.image in self.known.cloned:
                    return f"image {said.image} is not persistent any more"
                return f"VM {min(others)} has image {said.image}" if others else ""
        return ""

    def _root(self, root: BaseStore) -> Iterator[Finding]:
        for base in root.bases:
            said = base_names.named(base.name)
            for lease in base.leases:
                if not self._uses(lease.vm, lease.disk):
                    where = "not here" if lease.vm in self.known.vms else "not known to oned"
                    reason = f"VM {lease.vm} is {where}: no disk uses it"
                    yield self._finding("lease", Seen(lease.path, "", lease.age, 0), reason, lease.vm)
            for staged in filter(self._is_idle, base.staged):
                yield self._finding("staged", staged, "a killed action left it")
            if said and not base.leases and (said.store, said.image) not in self.known.images:
                yield self._finding("base", base, f"image {said.image} is not known to oned")
        for staging in root.staging:
            if not staging.held:
                yield self._finding("staging", staging, "nobody is making this base")
        for lock in root.locks:
            if lock.vm not in self.known.vms:
                yield self._finding("lock", lock, f"VM {lock.vm} is not known to oned", lock.vm)

    def _uses(self, vm: int, disk: int) -> bool:
        """Tell whether a disk of a VM is here, or staged here, or may be in what is not mounted."""
        return self.machine.facts.is_away or any(
            disk_names.is_of_disk(entry, disk) for entry in self.entries.get(vm, ())
        )

    def _foreign(self, store: str, side: SeenSide, clone: SeenClone) -> str:
        return self.known.whose(clone.vm, clone.disk, f"{store}/{side.name}", clone.cloud)

    def _store(self, store: SeenStore) -> Iterator[Finding]:
        path = store.path
        uploads = {upload.name for upload in store.uploads if upload.held}
        unseen = "" if self.everywhere.all_seen else "a host that cannot be asked may be writing it"
        for side in store.sides:
            for clone in side.clones:
                if clone.vm in self.known.vms:
                    continue
                foreign = self._foreign(path, side, clone)
                if foreign and clone.cloud:
                    continue  # nothing of ours, whatever it is
                keep = foreign or self.known.why_not(clone.vm) or self._runs_anywhere(clone)
                yield self._finding("clone", clone, f"VM {clone.vm} is not known to oned", -1, keep)
            is_gone = not side.image and f"{path}/{side.name}" not in self.known.sources
            if is_gone and dir_names.is_image(side.name) and side.name not in uploads:
                held = any(
                    c.vm in self.known.vms or self._foreign(path, side, c) or self.known.why_not(c.vm)
                    for c in side.clones
                )
                keep = "it holds clones of VMs" if held else ""
                reason = f"image {side.name} is not there and not known to oned"
                yield self._finding("side", side, reason, -1, keep)
        for upload in store.uploads:
            if not upload.held:
                yield self._finding("upload", upload, "nobody holds this upload")
        for epoch in store.epochs:
            is_ours = epoch.cloud == self.known.cloud and not self.known.why_not(epoch.vm)
            if epoch.vm not in self.known.vms and is_ours and not unseen:
                yield self._finding("epoch", epoch, f"VM {epoch.vm} is not known to oned")
        for staged in filter(self._is_idle, store.staged):
            yield self._finding("staged", staged, "a killed action left it", -1, unseen)
        images = {image.name for image in store.images}
        for image in store.images:
            name, is_snap = disk_names.disk_of(image.name), disk_names.are_layers(image.name)
            if not dir_names.is_image(name) or f"{path}/{name}" in self.known.sources or name in uploads:
                continue
            if is_snap and name not in images:
                reason = f"image {name} is not there and not known to oned"
                yield self._finding("snapshots", image, reason, -1, unseen)
            elif not is_snap:
                keep = "it may hold somebody's data: register it again, or remove it by hand"
                yield self._finding("image", image, "no image of oned has this SOURCE", -1, keep)
