# SPDX-License-Identifier: Apache-2.0
"""The health of a host, for its OpenNebula template: room for bases, and the stores of its disks.

    SEMISHARED = [ VERSION = "0.2.0", HEALTH = "store 100 is not mounted", STORES = "100 102", BASES = "3",
    LEASES = "17",
                   BASES_MB = "2048", FREE_MB = "51200", TOTAL_MB = "102400", BOOT = "6f0c2a4e-...", ADDRESSES
                   = "10.0.0.3 fd00::3" ]

With a pool also POOL, the number of its devices that take disks, POOL_FREE_MB and POOL_TOTAL_MB of all, and
POOL_LARGEST_MB, what is free on the one with most; and of each system datastore of ours that is no link what
there is on the pool, in the words of OpenNebula's own probe:

    DS = [ ID = 101, USED_MB = 51200, TOTAL_MB = 102400, FREE_MB = 51200 ]

That one, monitor_ds.rb, says of the same datastores what df says of DATASTORE_LOCATION. oned keeps all such
lines of a round, in order, and its schedulers take the last of an ID: from OpenNebula 7.0 on probes run in
the order of their names, and ours comes after it.

With memory in the pool (class ram), of which none of that counts, also RAM_TOTAL_MB, RAM_LARGEST_MB, the
largest disk that it takes yet, and RAM_RESERVED_KB, what RESERVED_MEM of the host has to keep from its VMs.

HEALTH is OK if every store that a VM's disk or a base here came from is mounted and answers, every device of
its pool is there, memory that is promised more than once is watched (host/watch.py), and no other machine has
the system datastores or the base store of this one. BOOT and ADDRESSES are what is known of the host when it
is dead: by them it is shut out of the stores (`semishared fence`). Run by im/semishared, which is what
OpenNebula's monitoring calls every 10 minutes with its settings as XML on stdin.
"""

from __future__ import annotations

import json
import os
import re
import sys

if __package__ in (None, ""):
    sys.path[0:0] = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]

from semishared import VERSION
from semishared.device import devices, offline
from semishared.device.systems import is_ours
from semishared.errors import SemisharedError, ToolTimeout
from semishared.model.base import names as base_names
from semishared.model.device.classes import MEMORY, needed_memory
from semishared.model.disk import names as disk_names
from semishared.model.refs import ImageRef
from semishared.tools.files import allocated
from semishared.tools.run import run
from semishared.tools.signatures import boot, sign
from semishared.tools.this_machine import addresses
from semishared.units import KiB, MiB

LOCATION = "/var/lib/one/datastores"
ANSWER_S = 3
"""A store that takes longer to answer hangs."""


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def stores(location: str) -> set[str]:
    """Return the directories of the mounted stores that bases and VMs here came from; nothing on a store is
    touched.
    """
    root = disk_names.base_store(location)
    bases = [name for name in _names(base_names.bases(root)) if name[:1].isdigit()]
    # A base from the network says so: its store is mounted nowhere.
    found = {
        f"{location}/{name.split('-')[0]}"
        for name in bases
        if not os.path.exists(base_names.source(base_names.base(root, name)))
    }
    for system in systems(location):
        for vm in filter(disk_names.is_number, _names(f"{location}/{system}")):
            records = disk_names.records(f"{location}/{system}/{vm}")
            for name in _names(records):
                source = _source(f"{records}/{name}")
                if source:
                    found.add(os.path.dirname(source))
    return found


def systems(location: str) -> list[str]:
    """Return the numbers of our system datastores here."""
    # It may be a store, and hang: even to ask what it is needs a limit.
    return [name for name in _names(location) if name.isdigit() and _is_ours(f"{location}/{name}")]


def shared(location: str) -> list[str]:
    """Return what of this machine's own another machine has as well."""
    own = {f"{location}/{name}": f"system datastore {name}" for name in systems(location)}
    own = {disk_names.base_store(location): "the base store", **own}
    found = []
    for directory, name in own.items():
        try:
            if os.path.isdir(directory) and sign(directory, remember=True)["alive"]:
                found.append(f"{name} is shared with another machine")
        except OSError:
            continue  # a full or read-only disk is told of elsewhere
    return found


def _is_ours(system: str) -> bool:
    try:
        return is_ours(system)
    except ToolTimeout:
        return False


def _source(record: str) -> str:
    """Return the file on a store that a disk was made from, '' if it is from none."""
    try:
        with open(record, "rb") as file:
            image = ImageRef.from_data(json.loads(file.read(disk_names.JSON_BYTES))["image"])
        return "" if image.access.can.has_bridge else image.source
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
    """Return which devices of the pool are not there, or not well, and what is wrong with them."""
    # Of one that has died and another in its place the path is the same.
    found = {(devices.mount(root, uuid), offline.state(root, uuid)) for uuid in devices.registered(root)}
    return [f"device {path} is {wrong}" for path, wrong in sorted(found) if wrong]


def unwatched(root: str) -> list[str]:
    """Return which memory is promised more than once while nothing moves disks away from it
    (host/watch.py).
    """
    if len(devices.usual(root)) == len(devices.registered(root)):
        return []
    from semishared.pool import memory as pool_memory

    found = [] if pool_memory.is_watched(root) else pool_memory.present(root)
    return [
        f"memory {devices.mount(root, device.uuid)} is promised more than once and not watched"
        for device in found
    ]


def pool(root: str) -> dict[str, int]:
    """Return what the pool has for disks and bases, nothing on a host without one."""
    if not devices.usual(root):
        return {}
    found = [device for device in devices.present(root) if device.share and device.device_class != MEMORY]
    free = [device.free // MiB for device in found]
    total = sum(device.capacity for device in found) // MiB
    return {
        "POOL": len(found),
        "POOL_FREE_MB": sum(free),
        "POOL_TOTAL_MB": total,
        "POOL_LARGEST_MB": max(free, default=0),
    }


def memory(root: str) -> dict[str, int]:
    """Return what memory the pool has for disks that are to be there, nothing without any: it is no capacity
    of the datastore.
    """
    found = [device for device in devices.present(root) if device.share and device.device_class == MEMORY]
    if not found:
        return {}
    return {
        "RAM_TOTAL_MB": sum(device.capacity for device in found) // MiB,
        "RAM_LARGEST_MB": max(max(device.unpromised, 0) for device in found) // MiB,
        "RAM_RESERVED_KB": sum(needed_memory(device.capacity) for device in found) // KiB,
    }


def capacity(location: str) -> list[str]:
    """Return the lines that tell oned's schedulers of the pool: of each system datastore whose disks lie
    there, nothing without a pool.
    """
    found = pool(disk_names.base_store(location))
    if not found:
        return []
    # Of the same sum: a scheduler that takes TOTAL less USED sees no more than what is free.
    total, free = found["POOL_TOTAL_MB"], found["POOL_FREE_MB"]
    # What is a link has nothing on devices (disk/on_devices.py): of that OpenNebula's own line is true.
    there = [system for system in systems(location) if not os.path.islink(f"{location}/{system}")]
    return [
        f"DS = [ ID = {system}, USED_MB = {total - free}, TOTAL_MB = {total}, FREE_MB = {free} ]"
        for system in there
    ]


def _plain(text: str) -> str:
    """Return a text as one value of a template: what is in labels and names of files ends none, and begins no
    attribute.
    """
    return "".join(c if c.isprintable() and c not in '"\\' else "?" for c in text)


def report(location: str) -> str:
    """Return the line for the host's template."""
    root = disk_names.base_store(location)
    offline.look(root)
    found = sorted(stores(location))
    bases = [base_names.base(root, name) for name in _names(base_names.bases(root))]
    stat = os.statvfs(location)
    values = {
        "VERSION": VERSION,
        "HEALTH": ", ".join(
            [*shared(location), *lost(root), *unwatched(root), *filter(None, map(trouble, found))]
        )
        or "OK",
        "STORES": " ".join(map(os.path.basename, found)),
        "BASES": len(bases),
        "LEASES": sum(len(_names(base_names.leases(base))) for base in bases),
        "BASES_MB": sum(allocated(base_names.image(base)) for base in bases) // MiB,
        "FREE_MB": stat.f_bavail * stat.f_frsize // MiB,
        "TOTAL_MB": stat.f_blocks * stat.f_frsize // MiB,
        "BOOT": boot(),
        "ADDRESSES": " ".join(addresses()),
    }
    values.update({**pool(root), **memory(root)})
    inside = ", ".join(f'{key} = "{_plain(str(value))}"' for key, value in values.items())
    return f"SEMISHARED = [ {inside} ]"


def main() -> int:
    """Print the report for the datastore location that stdin names."""
    match = re.search(r"<DATASTORE_LOCATION>\s*(?:<!\[CDATA\[)?(/[^<\]]*)", sys.stdin.read(1 << 20))
    location = os.path.normpath(match.group(1)) if match else LOCATION
    print("\n".join([report(location), *capacity(location)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
