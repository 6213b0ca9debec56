# SPDX-License-Identifier: Apache-2.0
"""Say where each disk lives and why, over which base, and which disks have leases on that.

  status             all VMs with a disk of ours, and what every host keeps
  status VM          the disks of a VM (id or name)
  status HOST        the disks and the bases on a host (name)
  status IMAGE       the disks that come from an image, and its bases (name); vm:X, host:X, image:X say which
  of the three

What a persistent image's local disk holds, and its image does not (SEMISHARED_PLACE = local), is `not
committed`: it is on that host alone, and lost with it. Such disks of VMs that were deleted are listed as
kept; semishared commit brings them to their images.

Directories for guests (semishared share) follow: how full they are, and which VMs have them.

exit codes: 0 said; 1 oned and the machines do not agree: a disk that should have a record has none, or a base
none of the kind; 2 a machine or oned could not be asked, or nothing is called so
"""

from __future__ import annotations

import argparse
from typing import Any, Iterable, Optional, Sequence, Union

from .. import NAME
from ..config import load
from ..errors import BadArguments, SemisharedError
from ..front import front_ends
from ..model.base import steps as base_steps
from ..model.disk import names as disk_names
from ..model.disk.place import NORMAL, OVERLAY
from ..model.job_steps import Job, ListJobs
from ..model.share.steps import ListedShare
from ..named import NamedTuple, to_data
from ..opennebula.states import LcmState, name_of
from ..opennebula.xml import Disk, Host, Image, Vm
from ..plan.care.gc_places import place_of
from ..plan.image.placement import place, reason
from ..tools.this_machine import is_here
from ..units import human
from ..wire.session import Session
from . import command as on
from .command import Row, argument, put, table
from .gc import shares_listed
from .jobs import told
from .share import number_columns, share_state, state_column

ARGUMENTS = (
    argument("what", nargs="?", metavar="VM|HOST|IMAGE", help="one of them; without it everything"),
    on.JSON,
)


OF_RECORD = (
    "place",
    "how",
    "format",
    "bytes",
    "uncommitted",
    "io_class",
    "snapshots",
    "path",
    "device",
    "hot",
    "delta",
)
"""Fields of a disk's record in a row."""


class Cloud:
    """oned's objects, and the machines' answers."""

    others: Sequence[str] = ()
    """The other front-ends of an HA group, if they were asked."""
    jobs: Sequence[tuple[str, Job]] = ()
    """What machines that were asked move now."""

    def __init__(self) -> None:
        self.oned = on.administrator()
        self.config = load()
        self.survey = on.Survey()
        self.stores = {store.id: store for store in self.oned.datastores()}
        self.images = {image.id: image for image in self.oned.images()}
        self.hosts = self.oned.hosts()
        self.front_end = on.front_end_of(self.hosts)
        self.vms = {vm.id: self.oned.vm(vm.id) for vm in self.oned.vms()}
        self.records: dict[tuple[str, int], base_steps.ReportedVm] = {}
        """(machine, VM) -> its records there."""
        self.bases: list[Row] = []
        self.kept: list[Row] = []
        """Disks of deleted VMs whose content no image has."""
        self.space: dict[str, Row] = {}

    def ask(self, hosts: list[Host]) -> None:
        ours = on.ours(self.stores.values())
        locations = sorted(set(map(on.location, ours)))
        systems = tuple(sorted(store.id for store in ours if store.is_system))

        moved: list[tuple[str, Job]] = []

        def look(session: Session, host: Host) -> list[tuple[base_steps.Reported, base_steps.Listed]]:
            answers = []
            moved.extend((host.name, job) for job in session.ask(ListJobs()))
            for location in locations:
                root = disk_names.base_store(location)
                steps = (base_steps.ReportDisks(location, systems), base_steps.ListBases(root))
                disks, bases = session.run(steps)
                answers.append((disks, bases))
            return answers

        def take(machines: list[Host]) -> None:
            for machine, answers in self.survey.ask(machines, "status", self.config, look).items():
                for said, listed in answers:
                    self.records.update({(machine, vm.vm): vm for vm in said.vms})
                    for text in said.errors:
                        self.survey.failed(machine, SemisharedError(text))
                    self.kept += [{"host": machine, **to_data(item)} for item in said.kept]
                    self.bases += [{"host": machine, **to_data(base)} for base in listed.bases]
                    self.space[machine] = {"free": listed.free, "total": listed.total}

        is_asked = any(host.name == self.front_end for host in hosts)
        take(hosts if is_asked else [*hosts, on.as_host(self.front_end)])
        rests = (vm.id for vm in self.vms.values() if vm.is_on_front_end and vm.driver == NAME)
        if any((self.front_end, vm) not in self.records for vm in rests):
            # They are on the front-end that led when they came to rest (plan/vm/at_rest.py).
            self.others = front_ends.others(self.oned)
            take(list(map(on.as_host, self.others)))
        self.jobs = sorted(moved, key=lambda item: (item[0], item[1].since, item[1].pid))

    def job_of(self, vm: int, disk: int) -> str:
        """Return in words what is done to a disk now, '' if nothing is."""
        mine = [job for _, job in self.jobs if job.vm == vm and job.disk in (-1, disk)]
        # A directory on its way is noted at both ends: how much has arrived counts.
        return told([job for job in mine if job.step != "send"] or mine)

    def machine_of(self, vm: Vm) -> str:
        """Return the machine that has a VM; for one at rest that is nowhere, this front-end."""
        if not vm.is_on_front_end:
            return vm.host
        homes = (name for name in (self.front_end, *self.others) if (name, vm.id) in self.records)
        return next(homes, self.front_end)

    def rows(self, vm: Vm) -> list[Row]:
        """Return a row per disk of ours of a VM."""
        machine = self.machine_of(vm)
        there = self.records.get((machine, vm.id), base_steps.ReportedVm(vm.id, -1, [], ""))
        by_number = {disk.disk: disk for disk in there.disks}
        was_asked = machine in self.space
        # While an action is under way a disk may not be there yet, or be elsewhere.
        is_settled = place_of(vm, self.front_end, is_here) is not None
        found = []
        for disk in vm.disks:
            if (disk.driver != NAME or disk.is_directory) and disk.id not in by_number:
                continue
            record = by_number.get(disk.id)
            image = self.images.get(disk.image_id)
            missing = "no record" if was_asked and record is None and is_settled else ""
            # What is wrong with the directory is wrong with all disks in it.
            wrong = there.wrong.get(str(disk.id), "") if there.wrong or there.disks else there.error
            said = {**dict.fromkeys(OF_RECORD), **(to_data(record) if record else {})}
            found.append(
                {
                    "vm": vm.id,
                    "name": vm.name,
                    "state": name_of(vm.state),
                    "host": machine,
                    "machine": machine,  # its name before 0.2
                    "disk": disk.id,
                    "image": image.name if image else None,
                    "image_id": disk.image_id if image else None,
                    **{name: said[name] for name in OF_RECORD},
                    "device": said["device"] or None,
                    "why": self.why(disk, image, record),
                    "base": self.base_of(machine, vm.id, disk.id),
                    "missing": wrong or missing,
                    "under_way": under_way(vm, is_settled, self.job_of(vm.id, disk.id)),
                }
            )
        return found

    def why(self, disk: Disk, image: Optional[Image], record: Optional[base_steps.ReportedDisk]) -> str:
        if image is None:
            return "volatile: its VM's own"
        store = self.stores.get(image.store_id)
        if store is None:
            return ""
        try:
            why = reason(image, store, disk)
            has_left = record and record.how == OVERLAY.name and place(image, store).is_remote
            return f"{why}, detached since" if has_left else why
        except SemisharedError as e:
            return e.detail

    def base_of(self, machine: str, vm: int, disk: int) -> str | None:
        lease = f"{vm}-{disk}"
        there = (base for base in self.bases if base["host"] == machine)
        return next((base["name"] for base in there if lease in base["leases"]), None)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared status`."""
    on.refuse_root("")
    cloud = Cloud()
    kind, thing = find(cloud, arguments.what)
    only = {"vm": "host", "host": "name"}.get(kind)
    cloud.ask([host for host in cloud.hosts if not only or host.name == getattr(thing, only)])
    rows = [row for vm in cloud.vms.values() for row in cloud.rows(vm)]
    bases = [base for base in cloud.bases if is_wanted_base(base, rows, kind, thing)]
    rows = [row for row in rows if is_wanted(row, kind, thing)]
    kept = [item for item in cloud.kept if is_wanted(as_row(item), kind, thing)]
    shares = [row for row in share_rows(cloud) if is_wanted_share(row, kind, thing)]
    answer = {"disks": rows, "bases": bases, "kept": kept, "shares": to_data(shares), "space": cloud.space}

    def show_all() -> None:
        show(cloud, rows, bases, kind)
        show_kept(kept)
        if shares:
            put()
            show_shares(shares)

    cloud.survey.told(arguments, answer, show_all)
    if cloud.survey.errors:
        return 2
    return int(any(row["missing"] for row in rows))


def find(cloud: Cloud, word: str | None) -> tuple[str, Vm | Host | Image | None]:
    """Return the VM, host or image that is meant; raise BadArguments if there is none of that name."""
    if word is None:
        return "", None
    kind, colon, name = word.partition(":")
    if not colon or kind not in ("vm", "host", "image"):
        kind, name = "", word
    candidates: list[tuple[str, Any]] = [
        *(("vm", vm) for vm in cloud.vms.values() if name in (str(vm.id), vm.name)),
        *(("host", host) for host in cloud.hosts if name == host.name),
        *(
            ("image", one)
            for one in cloud.images.values()
            if name in (one.name, str(one.id) if kind else None)
        ),
    ]
    for found in candidates:
        if not kind or kind == found[0]:
            return found
    raise BadArguments(f"no {kind or 'VM, host or image'} {name!r} in OpenNebula")


def is_wanted(row: Row, kind: str, thing: Any) -> bool:
    """Tell whether a disk belongs to what was asked for."""
    key = {"vm": "vm", "host": "machine", "image": "image_id"}.get(kind)
    return key is None or row[key] == (thing.name if kind == "host" else thing.id)


def as_row(item: Row) -> Row:
    """Return a kept disk as the row of a disk."""
    return {**item, "machine": item["host"], "image_id": (item["image"] or {}).get("id")}


def is_wanted_base(base: Row, rows: list[Row], kind: str, thing: Any) -> bool:
    """Tell whether a base belongs to what was asked for."""
    if kind == "vm":
        return any(lease.split("-")[0] == str(thing.id) for lease in base["leases"])
    if kind == "image":
        return bool(base["name"].split("-")[1] == str(thing.id))
    return kind != "host" or base["host"] == thing.name


UNDER_WAY = {
    "made": (LcmState.PROLOG, LcmState.CLEANUP_RESUBMIT),
    "moved": (
        LcmState.MIGRATE,
        LcmState.SAVE_MIGRATE,
        LcmState.BOOT_MIGRATE,
        LcmState.PROLOG_MIGRATE,
        LcmState.PROLOG_MIGRATE_POWEROFF,
        LcmState.PROLOG_MIGRATE_SUSPEND,
        LcmState.PROLOG_MIGRATE_UNKNOWN,
    ),
    "brought from the front-end": (LcmState.PROLOG_RESUME, LcmState.PROLOG_UNDEPLOY),
    "brought to the front-end": (LcmState.EPILOG_STOP, LcmState.EPILOG_UNDEPLOY),
    "removed": (LcmState.EPILOG, LcmState.CLEANUP_DELETE),
}
"""What oned has done to the disks of an ACTIVE VM -> LCM states; in all others they stay where they are."""


def under_way(vm: Vm, is_settled: bool = False, moved: str = "") -> str:
    """Return in words what is done with a VM's disks, '' if nothing is.

    That is what machines move (`moved`), else what oned is about to do. With either goes oned's name of the
    state, unless the VM `is_settled`: it stays where it is.
    """
    if is_settled:
        return moved
    if moved:
        return f"{moved} ({name_of(vm.lcm_state, LcmState) if vm.is_active else name_of(vm.state)})"
    if not vm.is_active:
        return f"not on a host yet ({name_of(vm.state)})"
    state = name_of(vm.lcm_state, LcmState)
    if vm.has_failed:
        return f"waits for onevm recover ({state})"
    done = next((word for word, states in UNDER_WAY.items() if vm.lcm_state in states), "")
    way = f" from {vm.hosts[-2]} to {vm.host}" if done == "moved" and len(vm.hosts) > 1 else ""
    return f"being {done}{way} ({state})" if done else f"oned is at work on it ({state})"


def short(base: str | None) -> str:
    """Return a base's name for people: without most of its generation."""
    if not base:
        return "-"
    head, _, generation = base.rpartition("-")
    return f"{head}-{generation[:8]}"


def lives(row: Row) -> str:
    """Return where a disk is, and what it is there; without a record of it, why there is none."""
    seen = f"{row['place']}, {row['how']}" if row["place"] else row["under_way"]
    parts = [row["missing"] or seen or f"unknown: {row['machine']} has not answered"]
    if row["place"] and row["under_way"] and not row["missing"]:
        parts.append(row["under_way"])
    if row["snapshots"] and not row["missing"]:
        parts.append(f"{row['snapshots']} snapshots")
    if row["delta"]:
        left = "" if row["under_way"] else " of a move that runs, or was killed: its next action merges it"
        parts.append(f"a delta{left}")
    if row["device"]:
        parts.append(f"on {row['device']}")
    if row["hot"]:
        parts.append("base in memory" if row["hot"]["path"] else f"base not in memory: {row['hot']['why']}")
    if row["uncommitted"]:
        parts.append(f"{human(row['uncommitted'])} not committed")
    if row["io_class"] not in (None, NORMAL):
        parts.append(row["io_class"])
    return ", ".join(parts)


def show(cloud: Cloud, rows: list[Row], bases: list[Row], kind: str) -> None:
    """Print two tables: disks, and bases (only counted per host, without a VM, host or image)."""
    lines = []
    for row in rows:
        disk = f"{row['vm']} {row['name']}", row["state"], row["machine"] or "-", str(row["disk"])
        size = human(row["bytes"]) if row["place"] == "local" else "-"
        lines.append([*disk, row["image"] or "-", lives(row), size, short(row["base"]), row["why"]])
    table("VM|STATE|ON|DISK|IMAGE|LIVES|SIZE|BASE|WHY", lines)
    put()
    lines = []
    if kind:
        for base in bases:
            leases = ", ".join(f"VM {lease.replace('-', ' disk ')}" for lease in base["leases"]) or "none"
            lines.append([base["host"], short(base["name"]), human(base["bytes"]), leases])
        table("ON|BASE|SIZE|LEASES", lines)
        return
    for machine, space in cloud.space.items():
        own = [base for base in bases if base["host"] == machine]
        count, size = sum(len(base["leases"]) for base in own), sum(base["bytes"] for base in own)
        lines.append([machine, str(len(own)), human(size), str(count), human(space["free"])])
    table("ON|BASES|SIZE|LEASES|FREE", lines)


def show_kept(kept: list[Row]) -> None:
    """Print the disks that were kept when their VMs were deleted, if there are any."""
    for item in kept:
        image = f"image {item['image']['id']}" if item["image"] else "an image"
        what = f"kept of VM {item['vm']} disk {item['disk']}, {human(item['bytes'])} not committed to {image}"
        put(f"{item['host']}: {what}: {item['path']}{': ' * bool(item.get('error')) + item.get('error', '')}")


class SharedShare(NamedTuple):
    """A share, what is wrong with it ('' for nothing), and the VMs that have it."""

    share: ListedShare
    datastore: int
    name: Optional[str]
    """The image's, None if oned has none."""
    vms: list[Row]
    state: str

    def to_data(self) -> Row:
        """Return all of it as JSON data."""
        more = {"datastore": self.datastore, "name": self.name, "vms": self.vms, "state": self.state}
        return {**to_data(self.share), "bytes": self.share.used, **more}


def share_rows(cloud: Cloud) -> list[SharedShare]:
    """Return all shares: how full each is, and which VMs have it."""
    having: dict[int, list[Row]] = {}
    for vm in cloud.vms.values():
        for disk in vm.disks:
            if disk.is_directory:
                image = cloud.images.get(disk.image_id)
                has = {
                    "vm": vm.id,
                    "name": vm.name,
                    "disk": disk.id,
                    "tag": disk.mount_tag,
                    "host": vm.host,
                    "readonly": disk.is_readonly or image is not None and image.is_readonly,
                }
                having.setdefault(disk.image_id, []).append(has)
    found = []
    for store in shares_listed(cloud.stores.values(), cloud.config, cloud.survey.failed):
        for row in store.rows:
            image = cloud.images.get(row.image)
            vms, state = having.get(row.image, []), share_state(row, image, store.store)
            found.append(SharedShare(row, store.store, image.name if image else None, vms, state))
    return found


def is_wanted_share(row: SharedShare, kind: str, thing: Union[Vm, Host, Image, None]) -> bool:
    """Tell whether a share belongs to the VM, host or image asked for, of `kind`; None: to all."""
    if thing is None:
        return True
    if kind == "image":
        return row.share.image == thing.id
    return any(vm["vm"] == thing.id if kind == "vm" else vm["host"] == thing.name for vm in row.vms)


def _having(vm: Row) -> str:
    where = f" on {vm['host']}" if vm["host"] else ""
    return f"{vm['vm']} {vm['name']}{where}{', read-only' if vm['readonly'] else ''}"


def show_shares(found: Iterable[SharedShare]) -> None:
    """Print shares as a table."""
    lines = []
    for row in found:
        share, vms = row.share, ", ".join(map(_having, row.vms))
        name = f"{share.image} {row.name or '-'}"
        numbers, state = number_columns(share), state_column(share, row.state)
        lines.append([name, str(row.datastore), *numbers, vms or "-", state])
    table("SHARE|DATASTORE|OWNER|SIZE|USED|SNAPSHOTS|VMS|STATE", lines)
