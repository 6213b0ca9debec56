# SPDX-License-Identifier: Apache-2.0
"""Names and paths of files on a host, formatted and parsed here alone (docs/reference/names.md).

    <DATASTORE_LOCATION>/.semishared/            the base store, `root`: model/base/names.py
        locks/vm-<vm>  vm-<vm>-disks  incoming-<vm>-<random>
    <DATASTORE_LOCATION>/<system>/               a system datastore
        .monitor  .machine-<id> (tools/signatures.py)  .incoming-<vm>-<random>  .outgoing-<vm>-<random>
        .removed- .kept-
        <vm>/                                    the directory of a VM, `vm_dir`; in it disk.<N>
        disk.<N>.snap/<layer>
            .semishared/disk.<N>.json            its record; and notes of what is under way

In a mounted store: model/store/dir_names.py; in a pool: model/store/rbd_names.py. Each of them imports little
and compiles a pattern at its first use: every action pays for more.
"""

from __future__ import annotations

import posixpath
import re

from ...named import NamedTuple

GO_OVER, DELTAS = "go-over.json", "deltas.json"
"""The note of disks that go over to another backing chain, and that of versions before it."""
SIDE = ".semishared"
"""Our directory in one of another owner."""
SUMS = ".sums"
JSON_BYTES = 1 << 20
"""Most bytes of a record, a note or a label, written or read."""


def is_number(name: str) -> bool:
    """Tell whether a name is a number: a system datastore's, a VM's, a layer's."""
    return name.isdigit() and name.isascii()


# -- unpublished files ------------------------------------------------------------------------------

STAGED = ".staged-"
"""Prefix of unpublished files; a process with the directory's lock may remove them."""


class Maker(NamedTuple):
    """The process that made a staged name."""

    machine: str
    """8 hex digits for the machine, and 8 for its boot."""
    pid: int
    started: str
    """Clock ticks since the boot."""


def staged(name: str, maker: str) -> str:
    """Return the name of `name` until it is published."""
    return f"{STAGED}{name}.{maker}"


def is_staged(entry: str, name: str = "") -> bool:
    """Tell whether an entry of a directory is unpublished (and to become `name`, if that is given)."""
    return entry.startswith(f"{STAGED}{name}." if name else STAGED)


def made_by(maker: Maker, random: str) -> str:
    """Return the end of a staged name."""
    return f"{maker.machine}-{maker.pid}-{maker.started}-{random}"


def maker_of(entry: str) -> Maker | None:
    """Return the maker of a staged name; None if the name does not say, as of 0.1.0."""
    match = re.search(r"\.([0-9a-f]{16})-([0-9]+)-([0-9]+)-[0-9a-f]{12}\Z", entry)
    return Maker(match.group(1), int(match.group(2)), match.group(3)) if match else None


# -- the layers of a disk, on a host and in a store (tools/layers.py) -------------------------------

_LAYERS = ".snap"


def layers(disk: str) -> str:
    """Return the directory of a disk's layers, by path or name; an image's snapshots in a store lie alike."""
    return f"{disk}{_LAYERS}"


def are_layers(directory: str) -> bool:
    """Tell whether a directory is of layers."""
    return directory.endswith(_LAYERS)


def disk_of(layers: str) -> str:
    """Return the disk of a directory of layers, by path or name as given; any other directory as it is."""
    return layers[: -len(_LAYERS)] if are_layers(layers) else layers


def layer(disk: str, number: object) -> str:
    return f"{layers(disk)}/{number}"


def layer_of(path: str) -> str:
    """Return the number in the path of a layer, '' for that of anything else."""
    directory, _, name = path.rpartition("/")
    return name if are_layers(directory) and is_number(name) else ""


def plain(path: str) -> str:
    """Return the path of the disk whose layer `path` is, or which it is itself."""
    return disk_of(posixpath.dirname(path)) if layer_of(path) else path


# -- the directory of a VM --------------------------------------------------------------------------


class DiskFile(NamedTuple):
    """What the path of a disk on a host says."""

    vm_dir: str
    disk: int
    layer: str = ""
    """The number of its layer, '' for the disk itself."""


def disk_name(disk: int) -> str:
    return f"disk.{disk}"


def disk_named(name: str) -> int | None:
    """Return N of `disk.N`, None for any other name."""
    match = re.match(r"disk\.([0-9]{1,9})\Z", name)
    return int(match.group(1)) if match else None


def is_of_disks(name: str) -> bool:
    """Tell whether a name begins as those of disks, and of all that OpenNebula's drivers put beside them."""
    return name.startswith("disk.")


def is_of_disk(name: str, disk: int) -> bool:
    """Tell whether a name is that of a disk, of what lies beside it, or of what is to become either."""
    own = disk_name(disk)
    return name == own or name.startswith(f"{own}.") or is_staged(name, own)


def disk(vm_dir: str, number: int) -> str:
    return f"{vm_dir}/{disk_name(number)}"


def disk_file(path: str) -> DiskFile | None:
    """Return what the path of a disk on a host says, None if it is none."""
    directory, _, name = plain(path).rpartition("/")
    number = disk_named(name)
    return (
        DiskFile(directory, number, layer_of(path))
        if directory and number is not None and name == disk_name(number)
        else None
    )


def records(vm_dir: str) -> str:
    """Return the directory of a VM's records and notes."""
    return f"{vm_dir}/{SIDE}"


def record_name(disk: int) -> str:
    return f"{disk_name(disk)}.json"


def recorded(name: str) -> int | None:
    """Return the disk of a record by its file name, None if it is none."""
    return disk_named(name[: -len(".json")]) if name.endswith(".json") else None


def record(vm_dir: str, disk: int) -> str:
    return f"{records(vm_dir)}/{record_name(disk)}"


def history_note(vm_dir: str) -> str:
    """Return the note of the SEQ of the VM's history."""
    return f"{records(vm_dir)}/vm.json"


def migration_note(vm_dir: str) -> str:
    """Return the proof that a live migration may go on."""
    return f"{records(vm_dir)}/migration.json"


def rest_note(vm_dir: str) -> str:
    """Return the note that the guest rests for us."""
    return f"{records(vm_dir)}/frozen.json"


def clone_note(vm_dir: str, disk: int) -> str:
    """Return the file that names the store clone of a disk before there is one."""
    return f"{records(vm_dir)}/clone.{disk}.json"


def job_note(vm_dir: str, disk: int) -> str:
    """Return the note of a job of QEMU on a disk."""
    return f"{records(vm_dir)}/job.{disk}.json"


def job_noted(name: str) -> int | None:
    """Return the disk of a job note, None for any other file."""
    match = re.match(r"job\.([0-9]{1,9})\.json\Z", name)
    return int(match.group(1)) if match else None


def is_unsettled(name: str) -> bool:
    """Tell whether a note says that work is under way in the guest: the next action ends it."""
    return (
        job_noted(name) is not None or posixpath.basename(rest_note("")) == name or name in (GO_OVER, DELTAS)
    )


def marks(vm_dir: str) -> str:
    """Return the note of what is marked in a VM's disks for the next increment of its backup."""
    return f"{records(vm_dir)}/marks.json"


def sums(vm_dir: str, mark: str, disk: int) -> str:
    """Return the file of a raw disk's sums when a mark was made (tools/block_sums.py)."""
    return f"{records(vm_dir)}/{mark}.{disk}{SUMS}"


def summed(name: str) -> str:
    """Return the mark of a file of sums by its name, '' if it is none."""
    mark, _, disk = name[: -len(SUMS)].rpartition(".") if name.endswith(SUMS) else ("", "", "")
    return mark if is_number(disk) else ""


def saved(vm_dir: str, disk: int) -> str:
    """Return the copy of a running guest's disk that is on its way to a pool."""
    return f"{vm_dir}/{STAGED}saved.{disk_name(disk)}"


def arriving_backup(vm_dir: str, disk: int) -> str:
    """Return the file of an arriving backup; not disk.N...: a restore removes what is staged for that."""
    return f"{vm_dir}/backup.{disk_name(disk)}"


def staged_backup(directory: str) -> str:
    """Return the name of a directory of copies for the backup drivers until they are whole."""
    return f"{posixpath.dirname(directory)}/{STAGED}backup"


def backup_copy(directory: str, number: int, increment: int = 0) -> str:
    """Return the name of a disk's copy for OpenNebula's backup drivers; increment 0 is a full backup."""
    return f"{disk(directory, number)}.{increment}"


# -- system datastores ------------------------------------------------------------------------------


class Beside(NamedTuple):
    """What the name of a directory beside a VM's says (disk/vm_dir_siblings.py)."""

    kind: str
    """incoming, outgoing, removed or kept."""
    vm: int


def location_of(vm_dir: str) -> str:
    """Return the DATASTORE_LOCATION in which `vm_dir` lies."""
    return posixpath.dirname(posixpath.dirname(vm_dir))


def monitor(system: str) -> str:
    """Return the file that tells the host's probe which driver to ask."""
    return f"{system}/.monitor"


def beside(system: str, kind: str, vm: object, random: str) -> str:
    return f"{system}/.{kind}-{vm}-{random}"


def beside_named(name: str) -> Beside | None:
    """Return what such a name says (0.1.0 gave them without RANDOM), None if it is none."""
    match = re.match(r"\.(incoming|outgoing|removed|kept)-([0-9]+)(?:-[0-9a-f]+)?\Z", name)
    return Beside(match.group(1), int(match.group(2))) if match else None


# -- the base store, and its locks ------------------------------------------------------------------


def base_store(location: str) -> str:
    """Return the base store of a host whose DATASTORE_LOCATION is `location`."""
    return f"{location}/{SIDE}"


def base_store_of(vm_dir: str) -> str:
    """Return the base store of the host on which `vm_dir` lies."""
    return base_store(location_of(vm_dir))


def locks(root: str) -> str:
    return f"{root}/locks"


def lock(root: str, name: str) -> str:
    return f"{locks(root)}/{name}"


def vm_lock(root: str, vm: int) -> str:
    """Return the lock for publishing into a VM's directory."""
    return lock(root, f"vm-{vm}")


def disks_lock(root: str, vm: int) -> str:
    """Return the lock that an action on a VM's disks holds as long as it runs."""
    return f"{vm_lock(root, vm)}-disks"


def is_vm_lock(name: str) -> bool:
    """Tell whether a lock is one of these two."""
    return name.startswith("vm-")


def incoming_lock(root: str, incoming: str) -> str:
    """Return the lock that the receiver of the directory `incoming` holds."""
    return lock(root, posixpath.basename(incoming)[1:])


def incoming_of(lock: str, vm: int) -> str:
    """Return the directory whose receiver holds a lock, '' if the lock is for no arrival of the VM."""
    return f".{lock}" if lock.startswith(f"incoming-{vm}-") else ""


def locked_vm(name: str) -> int | None:
    """Return the VM whose directory or arrival a lock is for; None for any other lock."""
    match = re.match(r"(?:vm|incoming)-([0-9]+)(?:-[0-9a-f]+)?\Z", name)
    return int(match.group(1)) if match else None


# -- deltas: layers that a guest writes to while it moves (guest/go_over.py) ------------------------


DELTA_NUMBER = 1_000_000
"""Of a delta among its disk's layers: above all that snapshots of OpenNebula give."""


def delta(vm_dir: str, number: int) -> str:
    return layer(disk(vm_dir, number), DELTA_NUMBER)


def is_delta(path: str) -> bool:
    """Tell whether a path is that of a delta."""
    return layer_of(path) == str(DELTA_NUMBER)


def with_second_name(layer: str) -> str:
    """Return the second name of a layer, whose own another file takes while its guest goes over to a base
    (guest/go_over.py).
    """
    return f"{layer}.kept"


def of_second_name(path: str) -> str:
    """Return the layer whose second name `path` is, '' if it is none."""
    return path[: -len(".kept")] if path.endswith(".kept") and layer_of(path[: -len(".kept")]) else ""


def go_over_note(vm_dir: str) -> str:
    """Return the note of the disks that go over to another backing chain: they have deltas, or will."""
    return f"{records(vm_dir)}/{GO_OVER}"


def delta_note(vm_dir: str) -> str:
    """Return the note that versions before it left of the same."""
    return f"{records(vm_dir)}/{DELTAS}"


def go_over_notes(vm_dir: str) -> tuple[str, str]:
    """Return both; the older one is removed first, as it counts where there is no other."""
    return delta_note(vm_dir), go_over_note(vm_dir)


# -- what lies beside a diff, a local disk of a persistent image (disk/commits.py) ------------------


IN_TRANSIT = "base"


def last_commit(vm_dir: str, disk: int) -> str:
    """Return the manifest of the image after the last commit: the next one leaves that out."""
    return f"{records(vm_dir)}/committed.{disk}"


def base_in_transit(path: str) -> str:
    """Return the base that goes along with the disk `path`, beside its layers (stage/ensure.py)."""
    return f"{layers(path)}/{IN_TRANSIT}"


def is_base_in_transit(path: str) -> bool:
    """Tell whether a file is that."""
    folder, name = posixpath.split(path)
    return name == IN_TRANSIT and are_layers(posixpath.basename(folder))
