# SPDX-License-Identifier: Apache-2.0
"""Names and paths in the base store of a host, `root`, and in the front-end's; see model/disk/names.py.

bases/<store>-<image>-<generation>/image  manifest  source  damaged  leases/<vm>-<disk>
staging/<store>-<image>/image  manifest  generation  have  leases/
locks/base-<store>-<image>  hot-<store>-<image>-<generation>  holders  port-<port>
holders/<store>-<image>-<generation>  rates
mounted/<system>
"""

from __future__ import annotations

import posixpath
import re
from bisect import bisect_right
from typing import Iterable, Optional, Tuple

from ...errors import BadArguments
from ...named import NamedTuple
from ..disk import names as disk_names

PARTS = ("bases", "staging", "locks", "holders")


class Name(NamedTuple):
    """What the name of a base says."""

    store: int
    image: int
    generation: str


def name(store: int, image: int, generation: str) -> str:
    return f"{store}-{image}-{generation}"


def named(name: str) -> Optional[Name]:
    """Return what the name of a base says, None if it is none."""
    match = re.match(r"([0-9]+)-([0-9]+)-([0-9a-f]{32})\Z", name)
    return Name(int(match.group(1)), int(match.group(2)), match.group(3)) if match else None


def prefix(store: int, image: int) -> str:
    """Return the prefix of the names of an image's bases; also the directory's name while one is made."""
    return f"{store}-{image}"


def prefix_of(name: str) -> str:
    """Return the same by the name of a base."""
    return name.rpartition("-")[0]


def bases(root: str) -> str:
    return f"{root}/bases"


def base(root: str, name: str) -> str:
    return f"{bases(root)}/{name}"


def root_of(base: str) -> str:
    """Return the base store in which a base is."""
    return posixpath.dirname(posixpath.dirname(base))


def all_staging(root: str) -> str:
    return f"{root}/staging"


def staging(root: str, prefix: str) -> str:
    """Return where a base of an image is made."""
    return f"{all_staging(root)}/{prefix}"


def image_lock(root: str, prefix: str) -> str:
    """Return the lock for staging or evicting bases of an image, or taking them out of use."""
    return disk_names.lock(root, f"base-{prefix}")


def hot_lock(root: str, name: str) -> str:
    """Return the lock for making a copy of a base in memory."""
    return disk_names.lock(root, f"hot-{name}")


def locked_image(name: str) -> Optional[str]:
    """Return the prefix of an image's bases by the name of its lock; None if it is another lock."""
    match = re.match(r"base-([0-9]+-[0-9]+)\Z", name)
    return match.group(1) if match else None


def holders(root: str, name: str = "") -> str:
    """Return the front-end's note of a base's holders; without a name, the directory of these notes."""
    return f"{root}/holders/{name}"


def mounted(root: str, system: str = "") -> str:
    """Return the note that a system datastore is mounted here; without a number, the notes' directory."""
    return f"{root}/mounted/{system}"


def rates(root: str) -> str:
    """Return a host's note of how fast bases came from each source."""
    return holders(root, "rates")


def holders_lock(root: str) -> str:
    return disk_names.lock(root, "holders")


def port_lock(root: str, port: int) -> str:
    """Return the lock of the session that streams on a port."""
    return disk_names.lock(root, f"port-{port}")


# -- in the directory of a base, and of one that is being made --------------------------------------


def image(directory: str) -> str:
    return f"{directory}/image"


def manifest(directory: str) -> str:
    return f"{directory}/manifest"


def generation(directory: str) -> str:
    """Return the file that says which generation is being made."""
    return f"{directory}/generation"


def have(directory: str) -> str:
    """Return the journal of the extents that have come."""
    return f"{directory}/have"


def unverified(directory: str) -> str:
    """Return the journal of extents that a killed run has left, while they are read again."""
    return f"{directory}/unverified"


def source(directory: str) -> str:
    """Return the file that says where a base is from, POOL/IMAGE, if its store is not mounted."""
    return f"{directory}/source"


def damaged(directory: str) -> str:
    """Return the image's name once it is out of use."""
    return f"{directory}/damaged"


def verified(directory: str) -> str:
    """Return the empty file whose mtime is when all of a base was read and found to be good."""
    return f"{directory}/verified"


def mended(directory: str) -> str:
    """Return the note of when a base was made anew under disks, and which leases these are."""
    return f"{directory}/mended"


def leases(directory: str) -> str:
    return f"{directory}/leases"


def lease_name(vm: int, disk: int) -> str:
    return f"{vm}-{disk}"


def lease(directory: str, vm: int, disk: int) -> str:
    return f"{leases(directory)}/{lease_name(vm, disk)}"


def is_leased_to(name: str, vm: int, disk: Optional[int]) -> bool:
    """Tell whether a lease is a disk's, or any disk's of the VM."""
    return name.startswith(f"{vm}-") if disk is None else name == lease_name(vm, disk)


def leased_to(name: str) -> Optional[tuple[int, int]]:
    """Return VM and disk of a lease, None if the name is none."""
    vm, _, disk = name.partition("-")
    return (int(vm), int(disk)) if disk_names.is_number(vm) and disk_names.is_number(disk) else None


# Sets of extents as ranges (first, last + 1), in order: a few numbers for most of an image.


Ranges = Tuple[Tuple[int, int], ...]
ALL: Ranges = ((0, 1 << 62),)


def ranges(indices: Iterable[int]) -> Ranges:
    """Return sorted indices as ranges."""
    found: list[list[int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1][1] = index + 1
        else:
            found.append([index, index + 1])
    return tuple((first, last) for first, last in found)


def within(wanted: Ranges, indices: Iterable[int]) -> list[int]:
    """Return those of `indices` that are in the ranges."""
    firsts = [first for first, _ in wanted]
    found = []
    for index in indices:
        at = bisect_right(firsts, index) - 1
        if at >= 0 and index < wanted[at][1]:
            found.append(index)
    return found


def from_data(data: object) -> Ranges:
    """Return the ranges in JSON data; raise BadArguments."""
    try:
        return tuple((int(first), int(last)) for first, last in data)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise BadArguments(f"no ranges: {str(data)[:200]}") from None
