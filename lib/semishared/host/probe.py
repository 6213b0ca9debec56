# SPDX-License-Identifier: Apache-2.0
"""The health of a host, for its OpenNebula template: room for bases, and the stores of its disks.

    HEALTH_SEMISHARED = "store 100 is not mounted"
    SEMISHARED = [ VERSION = "0.2.0", HEALTH = "store 100 is not mounted", STORES = "100 102",
                   BASES = "3", WAITING = "0", LEASES = "17", BASES_MB = "2048", FREE_MB = "51200",
                   TOTAL_MB = "102400", BOOT = "6f0c2a4e-...", ADDRESSES = "10.0.0.3 fd00::3" ]

HEALTH_SEMISHARED sorts before most of a host's attributes: Sunstone shows them page by page, and HEALTH
within SEMISHARED is on the second. HEALTH has the same text, for one more release: policies of sites may read
it.

With a pool also POOL, the number of devices that take disks; POOL_FREE_MB and POOL_TOTAL_MB, their sums; and
POOL_LARGEST_MB, the free space of the device with most. And for each of our system datastores that is no
link, the pool's space in the format of OpenNebula's own probe:

    DS = [ ID = 101, USED_MB = 51200, TOTAL_MB = 102400, FREE_MB = 51200 ]

OpenNebula's monitor_ds.rb reports for the same datastores what df says of DATASTORE_LOCATION. oned keeps the
lines of a round in order, and its schedulers use the last one of an ID. From OpenNebula 7.0 on probes run in
the order of their names, and this one comes after that one.

With memory in the pool (class ram), which counts in none of these, also RAM_TOTAL_MB; RAM_LARGEST_MB, the
largest disk that still fits; and RAM_RESERVED_KB, what RESERVED_MEM of the host has to keep from its VMs.

WAITING is how many things wait here for an operator, of those that this host sees by itself: directories that
deleted VMs have left, damaged bases, devices and the disk where 90 % are used. `semishared attention` names
them, and all others. They leave HEALTH as it is: guests run, and schedulers go on using the host.

HEALTH is OK if every store that a VM's disk or a base here came from is mounted and answers, no device of the
pool is offline, overcommitted memory is watched (host/watch.py), and no other machine has this one's system
datastores or base store. BOOT and ADDRESSES identify the host when it is dead: `semishared fence` shuts it
out of the stores by them. OpenNebula's monitoring runs im/semishared, and so this, every 10 minutes with its
settings as XML on stdin.
"""

import json
import os
import re
import sys
from typing import Sequence

if __package__ in (None, ""):
    sys.path[0:0] = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]

from semishared import VERSION
from semishared.device import devices, offline
from semishared.device import memory as of_memory
from semishared.device.systems import is_ours
from semishared.errors import SemisharedError, ToolTimeout
from semishared.model.base import names as base_names
from semishared.model.device.classes import needed_memory
from semishared.model.disk import names as disk_names
from semishared.model.refs import ImageRef
from semishared.model.store.access import is_path
from semishared.tools.files import allocated
from semishared.tools.run import run
from semishared.tools.signatures import boot, sign
from semishared.tools.this_machine import addresses
from semishared.units import KiB, MiB

LOCATION = "/var/lib/one/datastores"
HEALTH = "HEALTH_SEMISHARED"
FULL_PERCENT = 90
"""As plan/care/attention.py, which would cost this start its time."""
ANSWER_S = 3
"""Seconds after which a store counts as hung."""


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def stores(location: str, ours: Sequence[str]) -> set[str]:
    """Return the directories of the mounted stores that bases and VMs here came from; touch no store.

    `ours`: numbers of our system datastores.
    """
    root = disk_names.base_store(location)
    bases = [name for name in _names(base_names.bases(root)) if name[:1].isdigit()]
    # A base from a networked store has a note of that: its store is mounted nowhere.
    found = {
        f"{location}/{name.split('-')[0]}"
        for name in bases
        if not os.path.exists(base_names.source(base_names.base(root, name)))
    }
    for system in ours:
        for vm in filter(disk_names.is_number, _names(f"{location}/{system}")):
            records = disk_names.records(f"{location}/{system}/{vm}")
            for name in _names(records):
                source = _source(f"{records}/{name}")
                if source:
                    found.add(os.path.dirname(source))
    return found


def systems(location: str) -> list[str]:
    """Return the numbers of our system datastores on this host."""
    # A datastore may be a hung mount: `_is_ours` has a time limit.
    return [name for name in _names(location) if name.isdigit() and _is_ours(f"{location}/{name}")]


def shared(location: str, ours: Sequence[str]) -> list[str]:
    """Return which of this machine's own directories another machine has as well."""
    own = {f"{location}/{name}": f"system datastore {name}" for name in ours}
    own = {disk_names.base_store(location): "the base store", **own}
    found = []
    for directory, name in own.items():
        try:
            if os.path.isdir(directory) and sign(directory, remember=True)["alive"]:
                found.append(f"{name} is shared with another machine")
        except OSError:
            continue  # other checks report a full or read-only disk
    return found


def _is_ours(system: str) -> bool:
    try:
        return is_ours(system)
    except ToolTimeout:
        return False


def _source(record: str) -> str:
    """Return the file on a store that a disk was made from, '' if there is none."""
    try:
        with open(record, "rb") as file:
            image = ImageRef.from_data(json.loads(file.read(disk_names.JSON_BYTES))["image"])
        return image.source if is_path(image.source) else ""
    except (OSError, ValueError, TypeError, KeyError, RecursionError, SemisharedError):
        return ""


def trouble(store: str) -> str:
    """Return what is wrong with a store, '' if it is mounted and answers."""
    name = os.path.basename(store)
    try:
        names = run(["ls", "-A", "--", store], timeout_s=ANSWER_S)
    except ToolTimeout:
        return f"store {name} hangs"
    except SemisharedError:
        return f"store {name} is not mounted"
    return "" if names.strip() else f"store {name} is not mounted"


def lost(root: str) -> list[str]:
    """Return the offline devices of the pool, each with what is wrong."""
    # A dead device and its replacement have the same path.
    found = {(devices.mount(root, uuid), offline.state(root, uuid)) for uuid in devices.registered(root)}
    return [f"device {path} is {wrong}" for path, wrong in sorted(found) if wrong]


def unwatched(root: str) -> list[str]:
    """Return the overcommitted memory from which no watcher moves disks away (host/watch.py)."""
    if of_memory.is_watched(root):
        return []
    return [
        f"memory {devices.mount(root, device.uuid)} is promised more than once and not watched"
        for device in of_memory.overcommitted(root)
    ]


def waiting(location: str, ours: Sequence[str], bases: Sequence[str], disk: tuple[int, int]) -> int:
    """Return how many things wait here for an operator; `disk`: bytes of this host's own, and free ones."""
    beside = (disk_names.beside_named(name) for system in ours for name in _names(f"{location}/{system}"))
    kept = sum(found is not None and found.kind == "kept" for found in beside)
    damaged = sum(os.path.lexists(base_names.damaged(base)) for base in bases)
    pool = devices.lasting(disk_names.base_store(location))
    sizes = [disk, *((device.capacity, device.free) for device in pool if device.uuid)]
    full = sum((total - free) * 100 >= total * FULL_PERCENT for total, free in sizes if total)
    return kept + damaged + full


def pool(root: str) -> dict[str, int]:
    """Return the pool's space for disks and bases, {} on a host without a pool."""
    found = [device for device in devices.lasting(root) if device.uuid]
    if not found and not devices.usual(root):
        return {}
    free = [device.free // MiB for device in found]
    total = sum(device.capacity for device in found) // MiB
    return {
        "POOL": len(found),
        "POOL_FREE_MB": sum(free),
        "POOL_TOTAL_MB": total,
        "POOL_LARGEST_MB": max(free, default=0),
    }


def memory(root: str) -> dict[str, int]:
    """Return the pool's memory for disks, {} without any; it is no capacity of the datastore."""
    found = [device for device in devices.memory(root) if device.share]
    if not found:
        return {}
    return {
        "RAM_TOTAL_MB": sum(device.capacity for device in found) // MiB,
        "RAM_LARGEST_MB": max(max(device.unpromised, 0) for device in found) // MiB,
        "RAM_RESERVED_KB": sum(needed_memory(device.capacity) for device in found) // KiB,
    }


def capacity(location: str) -> list[str]:
    """Return a DS line for each system datastore whose disks lie on the pool, none without a pool."""
    found = pool(disk_names.base_store(location))
    if not found:
        return []
    # USED and FREE add up to TOTAL, for schedulers that compute TOTAL - USED.
    total, free = found["POOL_TOTAL_MB"], found["POOL_FREE_MB"]
    # Disks in a datastore that is a link lie on no device (disk/on_devices.py): df is right for it.
    there = [system for system in systems(location) if not os.path.islink(f"{location}/{system}")]
    return [
        f"DS = [ ID = {system}, USED_MB = {total - free}, TOTAL_MB = {total}, FREE_MB = {free} ]"
        for system in there
    ]


def _plain(text: str) -> str:
    """Return a text safe as one value of a template: no label or file name ends it or adds an attribute."""
    return "".join(c if c.isprintable() and c not in '"\\' else "?" for c in text)


def report(location: str) -> str:
    """Return the two lines for the host's template."""
    root = disk_names.base_store(location)
    offline.look(root)
    ours = systems(location)
    found = sorted(stores(location, ours))
    bases = [base_names.base(root, name) for name in _names(base_names.bases(root))]
    stat = os.statvfs(location)
    wrong = [*shared(location, ours), *lost(root), *unwatched(root), *filter(None, map(trouble, found))]
    health = ", ".join(wrong) or "OK"
    values = {
        "VERSION": VERSION,
        "HEALTH": health,
        "STORES": " ".join(map(os.path.basename, found)),
        "BASES": len(bases),
        "WAITING": waiting(
            location, ours, bases, (stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)
        ),
        "LEASES": sum(len(_names(base_names.leases(base))) for base in bases),
        "BASES_MB": sum(allocated(base_names.image(base)) for base in bases) // MiB,
        "FREE_MB": stat.f_bavail * stat.f_frsize // MiB,
        "TOTAL_MB": stat.f_blocks * stat.f_frsize // MiB,
        "BOOT": boot(),
        "ADDRESSES": " ".join(addresses()),
    }
    values.update({**pool(root), **memory(root)})
    inside = ", ".join(f'{key} = "{_plain(str(value))}"' for key, value in values.items())
    return f'{HEALTH} = "{_plain(health)}"\nSEMISHARED = [ {inside} ]'


def main() -> int:
    """Print the report for the datastore location that stdin names."""
    match = re.search(r"<DATASTORE_LOCATION>\s*(?:<!\[CDATA\[)?(/[^<\]]*)", sys.stdin.read(1 << 20))
    location = os.path.normpath(match.group(1)) if match else LOCATION
    print("\n".join([report(location), *capacity(location)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
