# SPDX-License-Identifier: Apache-2.0
"""The names and paths of what is ours below the root of a datastore of shares; see model/disk/names.py.

<root>/.semishared/store                   its marker (model/store/dir_names.py)
                   .shares/<image>.json    what a share is: there from before it is made until nothing of it
                   is left
                           <image>.lock
                   .uids/<number>          which owner the users of a range are
                   .keys/<image>[-<vm>][-ro].json    a Ceph key for a share (share/ceph_clients.py)
<root>/share-<image>/                      its tree
       gone-<image>/                       a tree that is being removed: its own name is free at once
       share-<image>/.snap/<name>/         a snapshot of one, on CephFS
       snapshot-<image>-<name>/            a snapshot of a tree, where those lie beside it (btrfs)
"""

from __future__ import annotations

import re

from ..disk.names import SIDE

SHARES = f"{SIDE}/.shares"
UIDS = f"{SIDE}/.uids"
KEYS = f"{SIDE}/.keys"
OF_CEPHFS = ".snap"
_SOURCE = re.compile(r"(/.+)/share-(0|[1-9][0-9]{0,9})(/[0-9a-f-]{36})?\Z")
_SNAPSHOT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}\Z")
_RECORD = re.compile(r"([0-9]{1,10})\.json\Z")
_KEY = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?(-ro)?\.json\Z")


def tree(image: int) -> str:
    """Return the name of a share's tree."""
    return f"share-{image}"


def root_and_image(source: str) -> tuple[str, int]:
    """Return root and image of a share by the path of its tree, or of its content; ('', -1) if it is none."""
    match = _SOURCE.match(source)
    return (match.group(1), int(match.group(2))) if match else ("", -1)


def namespace(marker: str, image: int) -> str:
    """Return the RADOS namespace of a share on CephFS: no other root, group or OpenNebula has the same."""
    return f"semishared-{marker}-{tree(image)}"


def gone(image: int) -> str:
    """Return the name of a tree that is being removed."""
    return f"gone-{image}"


def snapshot(image: int, name: str) -> str:
    """Return the name of a snapshot that lies beside its tree."""
    return f"snapshot-{image}-{name}"


def snapshot_of(image: int, entry: str) -> str:
    """Return the name of the snapshot that an entry of the root is, '' if it is none."""
    before = snapshot(image, "")
    name = entry[len(before) :]
    return name if entry.startswith(before) and may_be_snapshot(name) else ""


def may_be_snapshot(name: str) -> bool:
    """Tell whether a snapshot may have this name: CephFS reserves names that begin with _."""
    return bool(_SNAPSHOT.match(name))


def below(name: str) -> str:
    """Return the path of a snapshot of a CephFS subvolume, seen from the subvolume."""
    return f"{OF_CEPHFS}/{name}"


def inside(name: str, inode: int) -> str:
    """Return its path as CephFS shows it in all directories of the subvolume, by the subvolume's inode."""
    return f"{OF_CEPHFS}/_{name}_{inode}"


def record(image: int) -> str:
    """Return where the record of a share lies, seen from the root."""
    return f"{SHARES}/{image}.json"


def lock(image: int) -> str:
    """Return the lock for changing a share, seen from the root."""
    return f"{SHARES}/{image}.lock"


def image_of(name: str) -> int:
    """Return the image of a record in SHARES, -1 if the name is none."""
    match = _RECORD.match(name)
    return int(match.group(1)) if match else -1


def uids(number: int) -> str:
    """Return the file of the owner of a range of users, seen from the root."""
    return f"{UIDS}/{number}"


def number_of(name: str) -> int:
    """Return the number of the range of a file in UIDS, -1 if it is none."""
    return int(name) if re.match(r"[0-9]{1,6}\Z", name) else -1


def key(image: int, vm: int, readonly: bool) -> str:
    """Return the note that a VM (-1: no VM) has a key for a share, relative to the root."""
    return f"{KEYS}/{image}{'' if vm == -1 else f'-{vm}'}{'-ro' if readonly else ''}.json"


def key_of(name: str) -> tuple[int, int, bool] | None:
    """Return image, VM (-1: no VM) and whether it only reads, of a key's note in KEYS; None if it is none."""
    match = _KEY.match(name)
    return (int(match.group(1)), int(match.group(2) or -1), bool(match.group(3))) if match else None


def clients(vm_dir: str) -> str:
    """Return the note, in the directory of a VM, of which of its shares the guest itself is a client."""
    return f"{vm_dir}/{SIDE}/clients.json"
