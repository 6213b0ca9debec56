# SPDX-License-Identifier: Apache-2.0
"""The names of what is ours in a pool of Ceph; see model/disk/names.py.

one-<image>                           an image, and
one-<image>-<vm>-<disk>               a clone of it for a disk: OpenNebula's own names
one-<image>-rescued-<random>          made of a kept disk of the image (semishared commit --as-new-image)
    @semishared-<generation>  @semishared-new  @semishared-lent-<id>  @semishared-old-<x>  @semishared-undo
    @semishared-saved  @semishared-backup-<vm>-<random>-<increment>
<either>.semishared-<random>          one that is being made
<either>.semishared-changing          one whose content is being replaced
"""

from __future__ import annotations

import re
from typing import FrozenSet, Mapping, Optional, Tuple

from ...named import NamedTuple
from ..disk.names import SIDE

OURS = "semishared-"
"""Prefix of our snapshots."""
NEW = f"{OURS}new"
UNDO = f"{OURS}undo"
SAVED = f"{OURS}saved"
OLD = f"{OURS}old-"
LENT = f"{OURS}lent-"
BACKUP = f"{OURS}backup-"
MADE = "semishared_made"
"""Key of an image's metadata: which image of which datastore we made it for."""

SEQ = "semishared_seq"
"""The same, of the clone for a disk: the SEQ of its VM's history at which it was made."""

SESSION = "semishared_session"
"""The same: what names the session of a guest that was begun last, anew each time."""

CLAIM = "semishared_claim"
"""The same, of the record of the disk that may commit to the image (store/commit/claims.py)."""


MANIFEST = "semishared_manifest"
"""The same, of which generation a manifest is that lies in other keys, and in how many
(store/rbd/content.py).
"""


def manifest(number: int) -> str:
    """Return the key of a piece of a manifest."""
    return f"{MANIFEST}_{number}"


def is_manifest(key: str) -> bool:
    return key.startswith(MANIFEST)


def epoch(vm: int, cloud: str = "") -> str:
    """Return the metadata key that says since when a VM is elsewhere than on a lost host (its epoch)."""
    return f"semishared_epoch_{vm}_{cloud}" if cloud else f"semishared_epoch_{vm}"


class Name(NamedTuple):
    """What the name of an image says."""

    image: int
    vm: Optional[int]
    """Whose disk the clone is, None for an image."""
    disk: Optional[int]
    is_staged: bool = False
    is_changing: bool = False


def image(number: int) -> str:
    return f"one-{number}"


def clone(image: str, vm: int, disk: int) -> str:
    return f"{image}-{vm}-{disk}"


def rescued(image: str, random: str) -> str:
    """Return the name of an image that is made of a kept disk of another one, for OpenNebula to register."""
    return f"{image}-rescued-{random}"


def staged(image: str, random: str) -> str:
    return f"{image}{SIDE}-{random}"


def changing(image: str) -> str:
    return f"{image}{SIDE}-changing"


def is_staged(name: str, of: str) -> bool:
    """Tell whether `name` is an unpublished image for `of`."""
    return name.startswith(f"{of}{SIDE}-") and name != changing(of)


def is_ours(name: str) -> bool:
    """Tell whether an image is staged, or hidden while it is changed."""
    return f"{SIDE}-" in name


def named(name: str) -> Optional[Name]:
    """Return what the name of an image says, None if we do not give such names."""
    match = re.match(r"one-([0-9]+)(?:-([0-9]+)-([0-9]+))?(?:\.semishared-([0-9a-f]{12}|changing))?\Z", name)
    if not match:
        return None
    number, vm, disk, end = match.groups()
    is_changing = end == "changing"
    return Name(
        int(number),
        int(vm) if vm else None,
        int(disk) if disk else None,
        bool(end) and not is_changing,
        is_changing,
    )


def made_for(store: int, source: str) -> str:
    """Return our mark (MADE) on an image that we make: another image of that name does not have it."""
    return f"datastore {store} {source}"


def frozen(generation: str) -> str:
    """Return the snapshot that holds the content of a generation."""
    return f"{OURS}{generation}"


def generation(snapshot: str) -> str:
    """Return the generation whose content a snapshot holds, '' if that is not known."""
    match = re.match(r"semishared-([0-9a-f]{32})\Z", snapshot)
    return match.group(1) if match else ""


def is_passing(snapshot: str) -> bool:
    """Tell whether a snapshot is ours and serves an action, clones or guests that read it: no generation."""
    return snapshot.startswith(OURS) and snapshot != NEW and not generation(snapshot)


def is_lent(snapshot: str) -> bool:
    return snapshot.startswith(LENT)


def lent(snapshot: int) -> str:
    """Return the name under which guests read a snapshot whose content has no hash yet."""
    return f"{LENT}{snapshot}"


def backup(vm: int, mark: str) -> str:
    """Return the name of the snapshot that is a mark of a VM's disk (model/disk/marks.py), ss-RANDOM-NUMBER.

    An image in place may be of several VMs, one after the other.
    """
    return f"{BACKUP}{vm}-{mark.partition('-')[2]}"


def backed_up(snapshot: str) -> Optional[int]:
    """Return the VM for whose backups a snapshot is a mark, None for another snapshot."""
    match = re.match(r"semishared-backup-([0-9]{1,9})-[0-9a-f]{16}-[0-9]{1,9}\Z", snapshot)
    return int(match.group(1)) if match else None


def set_aside(random: str) -> str:
    """Return the name of a snapshot that was a generation and has clones still."""
    return f"{OLD}{random}"


# A Ceph cluster's facts about its clients, to shut one out.
#
# store/rbd/blocklist.py collects them, plan/care/fence.py decides by them.


FOR_EVER_S = 10 * 365 * 86400
"""Seconds that an entry of ours lasts unless `semishared fence --lift` removes it: Ceph has none without an
end.
"""


class Opener(NamedTuple):
    """A client that has an image open for writing, or the lock of one that had: it outlives the client."""

    image: str
    """POOL/IMAGE"""
    client: str
    """client.4142, as `rbd lock ls` has it."""
    address: str
    """10.0.0.3:0/1285607948: the last number is drawn anew by each connection."""


class Ceph(NamedTuple):
    """One cluster."""

    fsid: str
    openers: Tuple[Opener, ...] = ()
    daemons: FrozenSet[str] = frozenset()
    """Addresses of its OSDs, without ports."""
    images: FrozenSet[str] = frozenset()
    """POOL/IMAGE, of our pools."""
    bridges: FrozenSet[str] = frozenset()
    """Hosts that make and change images there (BRIDGE_LIST)."""


class Blocklist(NamedTuple):
    """The entries of a cluster's blocklist: address -> for how many seconds yet."""

    entries: Mapping[str, float]

    def lacks(self, wanted: Tuple[str, ...]) -> Tuple[str, ...]:
        """Return the wanted entries that are not there, or would expire before `semishared fence --lift`."""
        return tuple(entry for entry in wanted if self.entries.get(entry, 0.0) < FOR_EVER_S / 2)


def ip_of(address: str) -> str:
    """Return the bare address of ADDRESS:PORT/NONCE as Ceph writes it, in IPv6 without the brackets."""
    return address.rpartition(":")[0].strip("[]")


def canonical(text: str) -> str:
    """Return an address as Ceph and the kernel spell it, '' if it is none: addresses are compared as text."""
    import ipaddress

    if re.search(r"(?:^|[.:])0[0-9]", text):
        return ""  # 010 is 8 or 10: Python before 3.9.5 says 10
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return ""
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return "" if "%" in text else str(mapped or found)


def whole(ip: str) -> str:
    """Return the entry that shuts out every client of an address."""
    return f"[{ip}]:0/0" if ":" in ip else f"{ip}:0/0"


def is_whole(entry: str) -> bool:
    """Tell whether an entry is for an address, whatever connects from it."""
    return entry.endswith(":0/0")
