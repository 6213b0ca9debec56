# SPDX-License-Identifier: Apache-2.0
"""The names and paths of what is ours on a host, formatted here alone: docs/reference/names.md says what they are for.

    <DATASTORE_LOCATION>/.semishared/            the base store of a host, `root`
        bases/<store>-<image>-<generation>/leases/<vm>-<disk>
        staging/<store>-<image>/
        locks/base-<store>-<image>  vm-<vm>  vm-<vm>-disks
        holders/<store>-<image>-<generation>     on the front-end
    <DATASTORE_LOCATION>/<system>/<vm>/          the directory of a VM, `vm_dir`
        disk.<N>  disk.<N>.snap/<layer>
        .semishared/disk.<N>.json                its record; and notes of what is under way

What may lie in the directory of a VM, disk/layout.py looks at; the folder of layers is named in tools/layers.py.
"""

from __future__ import annotations

import posixpath

SIDE = ".semishared"
"""What is ours, in a directory that is not."""
BASES = "bases"
STAGING = "staging"
LOCKS = "locks"
HOLDERS = "holders"


def base_store(location: str) -> str:
    """Return the base store of a host whose DATASTORE_LOCATION is `location`."""
    return f"{location}/{SIDE}"


def base_store_of(vm_dir: str) -> str:
    """Return the base store of the host on which `vm_dir` lies."""
    return base_store(posixpath.dirname(posixpath.dirname(vm_dir)))


def base_name(store: int, image: int, generation: str) -> str:
    return f"{store}-{image}-{generation}"


def base(root: str, name: str) -> str:
    return f"{root}/{BASES}/{name}"


def lease(base_directory: str, vm: int, disk: int) -> str:
    return f"{base_directory}/leases/{vm}-{disk}"


def staging(root: str, store: int, image: int) -> str:
    """Return where a base of an image is made."""
    return f"{root}/{STAGING}/{store}-{image}"


def lock(root: str, name: str) -> str:
    return f"{root}/{LOCKS}/{name}"


def image_lock(root: str, store: int, image: int) -> str:
    """Return the lock of whoever stages, evicts or takes bases of an image out of use."""
    return lock(root, f"base-{store}-{image}")


def vm_lock(root: str, vm: int) -> str:
    """Return the lock of whoever publishes into a VM's directory."""
    return lock(root, f"vm-{vm}")


def disks_lock(root: str, vm: int) -> str:
    """Return the lock of whoever works on the disks of a VM, as long as the action takes."""
    return lock(root, f"vm-{vm}-disks")


def holders(root: str, name: str) -> str:
    """Return what the front-end remembers of who has a base."""
    return f"{root}/{HOLDERS}/{name}"


def disk_name(disk: int) -> str:
    return f"disk.{disk}"


def disk(vm_dir: str, number: int) -> str:
    return f"{vm_dir}/{disk_name(number)}"


def records(vm_dir: str) -> str:
    """Return the directory of a VM's records and notes."""
    return f"{vm_dir}/{SIDE}"


def record_name(disk: int) -> str:
    return f"{disk_name(disk)}.json"


def record(vm_dir: str, disk: int) -> str:
    return f"{records(vm_dir)}/{record_name(disk)}"


def history_note(vm_dir: str) -> str:
    """Return the note of the SEQ of the VM's history."""
    return f"{records(vm_dir)}/vm.json"


def migration_note(vm_dir: str) -> str:
    """Return the proof that a live migration may go on."""
    return f"{records(vm_dir)}/migration.json"


def clone_note(vm_dir: str, disk: int) -> str:
    """Return the file that names the store clone of a disk before there is one."""
    return f"{records(vm_dir)}/clone.{disk}.json"


def job_note(vm_dir: str, disk: int) -> str:
    """Return the note of a job of QEMU on a disk."""
    return f"{records(vm_dir)}/job.{disk}.json"
