# SPDX-License-Identifier: Apache-2.0
"""Every action of a cloud rehearsed before it is done: `semishared plan` says it, and nothing changes on any
machine.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import pytest

from faults.rig import file_digest
from lab.domains import described
from lab.oned.drivers import ActionFailed, Done, Runner, Step
from lab.oned.objects import Datastore, Image

if TYPE_CHECKING:
    from lab.cloud import Cloud

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
DATASTORES, RBD_STORE = "/var/lib/one/datastores", 110
REPOSITORY, NAME = 107, "8e4cbd"
KVMRC = "/var/tmp/one/etc/vmm/kvm/kvmrc"
OURS = "/semishared/"


_hashes: Dict[Tuple[int, ...], str] = {}


def _hash(path: str, about: os.stat_result) -> str:
    """Return the hash of a file's content; it is read once, by whichever machine's path, until it is
    changed.
    """
    key = (about.st_dev, about.st_ino, about.st_size, about.st_ctime_ns)
    if key not in _hashes:
        _hashes[key] = file_digest(Path(path))
    return _hashes[key]


def things(top: Path) -> Dict[str, Tuple[object, ...]]:
    """Return all below `top`: names, kinds, modes, sizes, contents, times, extended attributes."""
    found: Dict[str, Tuple[object, ...]] = {}
    _add(found, str(top), ".")
    return found


def _add(found: Dict[str, Tuple[object, ...]], path: str, name: str) -> None:
    """Add what is at `path` and all below, under `name`; by strings, since this is done before and after each
    action.
    """
    about = os.lstat(path)
    content = ""
    if stat.S_ISLNK(about.st_mode):
        content = os.readlink(path)
    elif stat.S_ISREG(about.st_mode):
        content = _hash(path, about)
    attributes = tuple(
        (one, os.getxattr(path, one, follow_symlinks=False))
        for one in os.listxattr(path, follow_symlinks=False)
    )
    found[name] = (about.st_mode, about.st_size, about.st_nlink, about.st_mtime_ns, content, attributes)
    if stat.S_ISDIR(about.st_mode):
        for entry in os.listdir(path):
            _add(found, f"{path}/{entry}", entry if name == "." else f"{name}/{entry}")


def state(cloud: Cloud) -> Tuple[Any, ...]:
    """Return all there is in a cloud: on every machine, in libvirt, and in Ceph its images with snapshots,
    watchers and locks.
    """
    ceph = cloud.lab.ceph.images() if RBD_STORE in cloud.oned.datastores else {}
    hosts = cloud.lab.hosts
    return (
        {node.name: things(node.path(DATASTORES)) for node in (cloud.lab.fe, *hosts)},
        [described(host) for host in hosts],
        ceph,
    )


class Rehearsing:
    """Stands where a cloud's runner stands: it has each action of ours planned, looks what that changed, and
    has it done.
    """

    def __init__(self, inner: Runner, cloud: Cloud) -> None:
        self._inner = inner
        self._cloud = cloud
        self.said: Dict[str, List[List[str]]] = {}
        """By action, as plan calls it: the steps that were said to follow each time; `...` for those that
        depend on an answer.
        """
        self.refused: Set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def local(self, argv: Sequence[str], stdin: Optional[str], environment: Dict[str, str]) -> Done:
        """Rehearse an action on the front-end, and do it."""
        folder, _, action = argv[0].rpartition(OURS)
        kind = "datastore/" if folder.endswith("/datastore") else ""
        return self._both(
            f"{kind}{action}", argv, stdin or "", lambda: self._inner.local(argv, stdin, environment)
        )

    def remote(self, host: str, steps: Sequence[Step]) -> Done:
        """Rehearse an action on a host, when what oned does before it is done, and do it."""
        *before, last = steps
        done = self._inner.remote(host, before) if before else Done(0)
        if done.rc:
            return done
        # As it comes through the shell that OpenNebula types into.
        return self._both(
            f"vmm/{last.argv[0].rpartition(OURS)[2]}",
            last.argv,
            f"{last.stdin}\n",
            lambda: self._inner.remote(host, [last]),
        )

    def _both(self, action: str, argv: Sequence[str], stdin: str, do: Callable[[], Done]) -> Done:
        from semishared.front import datastore, transfer
        from semishared.plan.vm import hypervisor

        kind, _, name = action.rpartition("/")
        known: Any = {"": transfer.PLANNED, "datastore": datastore.ACTIONS, "vmm": hypervisor.PLANNERS}[kind]
        if name not in known:
            return do()
        before = state(self._cloud)
        plan = self._cloud.lab.fe.run(
            [COMMAND, "plan", "--json", action, *argv[1:]], input=stdin.encode(), check=False, timeout=120
        )
        after = state(self._cloud)
        assert after == before, f"{action}: {_differences(before, after)}"
        assert plan.returncode in (0, 1), plan.stderr.decode()
        done = do()
        if plan.returncode:
            self.refused.add(action)
            assert done.rc == 1 and plan.stderr.decode().strip() in done.stderr, (plan.stderr, done.stderr)
        else:
            found = json.loads(plan.stdout)
            steps = [
                step["step"] for part in found["plan"] if "answers" not in part for step in part["steps"]
            ]
            self.said.setdefault(action, []).append(steps + ["..."] * found["open"])
        return done


def _differences(before: Any, after: Any) -> List[str]:
    """Return where two states differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted({*before, *after})
        return [f"{key}/{more}" for key in keys for more in _differences(before.get(key), after.get(key))]
    if isinstance(before, (tuple, list)) and isinstance(after, (tuple, list)) and len(before) == len(after):
        return [more for one, other in zip(before, after) for more in _differences(one, other)]
    return [] if before == after else [f"{before!r} -> {after!r}"]


@contextmanager
def rehearsing(cloud: Cloud) -> Iterator[Rehearsing]:
    """Have every action rehearsed that oned calls within the block."""
    drivers = cloud.oned.drivers
    inner = drivers.runner
    found = Rehearsing(inner, cloud)
    drivers.runner = found
    try:
        yield found
    finally:
        drivers.runner = inner


# -- what a VM goes through -----------------------------------------------------------------------------


def life(cloud: Cloud, store: int, **disks: Dict[str, Any]) -> None:
    """Have a VM with a disk of each of `disks` (attributes of an image) go through all that oned has drivers
    for.
    """
    oned = cloud.oned
    made = {
        name: cloud.data_image(f"re-{name}", b"rehearsed" * 1024, store=store, **more)
        for name, more in disks.items()
    }
    hot = cloud.data_image("re-hot", b"rehearsed" * 1024, store=store)
    images = [{"IMAGE_ID": str(image)} for image in (cloud.os_image("re-os", store=store), *made.values())]
    vm = cloud.deploy(
        "re", [*images, {"TYPE": "fs", "SIZE": "16", "FORMAT": "raw"}, {"TYPE": "swap", "SIZE": "16"}]
    )
    cloud.guest(vm)
    disk = oned.disk_attach(vm, hot)
    kept = [oned.disk_snapshot_create(vm, disk, name) for name in ("one", "two")]
    oned.disk_snapshot_delete(vm, disk, kept[0])
    whole(cloud, vm)
    for host in ("h2", "h1"):
        oned.vm_migrate(vm, host, how="live")
    backed_up(cloud, vm, "_live")
    oned.disk_detach(vm, disk)
    oned.vm_suspend(vm)
    oned.disk_snapshot_create(vm, 0, "asleep")
    oned.vm_resume(vm)
    cloud.guest(vm)
    oned.vm_poweroff(vm, hard=True)
    backed_up(cloud, vm, "")
    for number in range(len(images)):
        kept = [oned.disk_snapshot_create(vm, number, name) for name in ("off", "more")]
        oned.disk_snapshot_revert(vm, number, kept[0])
        oned.disk_snapshot_delete(vm, number, kept[1])
    oned.disk_resize(vm, 1, 32)
    saved = oned.disk_saveas(vm, 2, "re-saved")
    oned.vm_migrate(vm, "h2")
    oned.vm_resume(vm)
    cloud.guest(vm)
    cloud.terminate(vm)
    copy = oned.image_clone(saved, "re-copy")
    for image in (saved, copy, hot):
        oned.image_delete(image)


def whole(cloud: Cloud, vm: int) -> None:
    """Have a snapshot of the whole VM refused: it has disks that are not qcow2. So there is none to go back
    to.
    """
    message = f"<VMM_DRIVER_ACTION_DATA><DATASTORE><BASE_PATH>{DATASTORES}/101</BASE_PATH></DATASTORE></VMM_DRIVER_ACTION_DATA>"  # noqa: E501
    with pytest.raises(ActionFailed, match="cannot take part"):
        cloud.oned.drivers.vmm("h1", "snapshot_create", [f"one-{vm}", "0"], vm, message)
    with pytest.raises(ActionFailed, match="Could not revert"):
        cloud.oned.drivers.vmm("h1", "snapshot_revert", [f"one-{vm}", "none"], vm, message)


def backed_up(cloud: Cloud, vm: int, how: str) -> None:
    """Have a backup made, and restored if the VM is off, as OpenNebula's backup driver has it done."""
    oned, held = cloud.oned, cloud.oned.vm(vm)
    place, stdin = f"{held.last.host.name}:{cloud.vm_dir(vm)}", held.to_xml()
    words = ["semishared", place, "1:2", f"one-{vm}", "-", str(vm), "101"]
    oned.drivers.tm([f"PREBACKUP{how}", *words], stdin)
    there = f"{DATASTORES}/{REPOSITORY}/{vm}/{NAME}"
    cloud.lab.fe.run(["mkdir", "-p", there])
    copies = cloud.lab.node(held.last.host.name).path(f"{cloud.vm_dir(vm)}/backup")
    shutil.copytree(copies, cloud.lab.fe.path(there), dirs_exist_ok=True)
    cloud.lab.fe.run(["chown", "-R", "oneadmin:", there], user="root")
    oned.drivers.tm([f"POSTBACKUP{how}", *words], stdin)
    if how:
        return
    oned.datastores[REPOSITORY] = Datastore(
        REPOSITORY, "repository", 3, "rsync", "-", f"{DATASTORES}/{REPOSITORY}", {"TYPE": "BACKUP_DS"}
    )
    image = max(oned.images) + 1
    oned.images[image] = Image(
        image, "backup", 6, False, REPOSITORY, "repository", {}, source=NAME, format="raw", vms=[vm]
    )
    try:
        oned.drivers.tm(["RESTORE", "semishared", place, str(vm), str(image), "-1", "-1"])
    finally:
        del oned.images[image], oned.datastores[REPOSITORY]
        shutil.rmtree(cloud.lab.fe.path(f"{DATASTORES}/{REPOSITORY}"))


def moved_live(cloud: Cloud, store: int) -> None:
    """Move a VM whose disks are all in place, after a migration that a host's kvmrc does not allow."""
    system = cloud.os_image("re-mine", persistent=True, store=store)
    vm = cloud.deploy("re-live", [{"IMAGE_ID": str(system)}])
    cloud.guest(vm)
    kvmrc = cloud.lab.node("h1").path(KVMRC)
    text = kvmrc.read_text()
    kvmrc.write_text(f"{text}MIGRATE_OPTIONS=--copy-storage-all\n")
    try:
        with pytest.raises(ActionFailed, match="--copy-storage-all"):
            cloud.oned.vm_migrate(vm, "h2", how="live")
    finally:
        kvmrc.write_text(text)
    cloud.oned.vm_migrate(vm, "h2", how="live")
    cloud.guest(vm)
    cloud.terminate(vm)
