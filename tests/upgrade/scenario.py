# SPDX-License-Identifier: Apache-2.0
"""The tests of an upgrade, the same for each kind of store: first with machines that have not got it yet,
then with all.

In this order: what is refused in the first tests must leave the VMs as they are for the later ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import contextmanager
from typing import Iterator, List, Sequence

import pytest

from lab import roots
from lab.cloud import DATASTORES, SYSTEM
from lab.forks import serve
from lab.guest import content
from lab.oned import ActionFailed
from lab.oned.objects import Datastore, Image
from upgrade import refusal, versions
from upgrade.world import COMMAND, KIB, OTHER_SYSTEM, PLACES, Disk, Old, older_cloud

REFUSED = tuple(PLACES) if os.environ.get("SEMISHARED_FULL") else ("in-place", "overlay")
"""Places of the disks that actions are called for where they must be refused: it is the conversation that
refuses, whatever the disk.
"""
REPOSITORY, NAME = 107, "8e4cbd"
SYNC = "onehost sync --force"
GONE = {"is not known to oned"}


def attach_and_detach(old: Old, places: Sequence[str] = tuple(PLACES)) -> None:
    """Give the running VM one more disk of each place, use it, and take it away again."""
    vm = old.vms["run"]
    guest = old.cloud.guest(vm)
    for place in places:
        name = f"{place} {old.formats[0]}"
        image = old.images["idle"] if place == "in-place" else old.images[name]
        disk = old.cloud.oned.disk_attach(vm, image)
        target = old.cloud.oned.vm(vm).disks[-1]["TARGET"]
        guest.wait_disk(target)
        guest.check(target, "base", 0, KIB)
        guest.write(target, "hot", 3072, 64)
        old.cloud.oned.disk_detach(vm, disk)
        guest.wait_disk(target, present=False)
        if place == "in-place":
            assert old.stored(image, old.formats[-1], 3072) == content("hot", 3072, 64)


def said(old: Old, since: int, action: str) -> str:
    """Return what an action has said since the call with that number."""
    return "".join(call.stderr for call in old.cloud.oned.calls[since:] if call.action == action)


def judged(old: Old, calls: Sequence[refusal.Call]) -> List[str]:
    """Make calls that must be refused; return complaints: of those that were not, and of what they
    changed.
    """
    before, complaints = old.everything(), []
    for call in calls:
        line = refusal.refusal(old, call)
        if call.action == "failmigrate" and line == refusal.DONE:
            continue  # nothing is at the target, and nobody else had to be asked
        if "SS011" not in line or SYNC not in line or versions.RELEASE not in line:
            complaints.append(f"{call.action} {' '.join(call.words)}: {line}")
        after = old.everything()
        complaints += [
            f"{call.action} {' '.join(call.words)} changed {text}"
            for text in refusal.differences(before, after)
        ]
        before = after
    return complaints


@contextmanager
def backed_up(old: Old, vm: int) -> Iterator[int]:
    """Keep the copies that a prebackup has made where a backup driver would, as the image of a backup; yield
    its id.
    """
    cloud, oned = old.cloud, old.cloud.oned
    there = f"{DATASTORES}/{REPOSITORY}/{vm}/{NAME}"
    cloud.lab.fe.run(["mkdir", "-p", there])
    shutil.copytree(
        cloud.lab.node("h1").path(f"{cloud.vm_dir(vm)}/backup"), cloud.lab.fe.path(there), dirs_exist_ok=True
    )
    cloud.lab.fe.run(["chown", "-R", "oneadmin:", there], user="root")
    image, base = max(oned.images) + 1, f"{DATASTORES}/{REPOSITORY}"
    oned.datastores[REPOSITORY] = Datastore(
        REPOSITORY, "repository", 3, "rsync", "-", base, {"TYPE": "BACKUP_DS"}
    )
    oned.images[image] = Image(
        image, "backup", 6, False, REPOSITORY, "repository", {}, source=NAME, format="raw", vms=[vm]
    )
    try:
        yield image
    finally:
        del oned.images[image], oned.datastores[REPOSITORY]
        shutil.rmtree(cloud.lab.fe.path(base))


class Upgrade:
    """What must be true after an upgrade from the older version, with images in one kind of store."""

    kind = ""

    @pytest.fixture(scope="class")
    def old(self) -> Iterator[Old]:
        """Return the cloud after the steps that install.sh names; until the last of them, it works as
        well.
        """
        with older_cloud(self.kind) as old:
            lab = old.cloud.lab
            before = old.everything()
            assert "onehost sync --force" in versions.install(lab)
            versions.sync(lab)
            serve(lab)
            assert refusal.differences(before, old.everything()) == []
            attach_and_detach(old)
            lab.fe.run([COMMAND, "setup", "--apply", "--system", f"semi_sys_{SYSTEM}"])
            yield old

    # -- machines of different versions --------------------------------------------------------------

    def test_host_that_was_not_synced_refuses_in_one_line_and_nothing_is_half_done(self, old: Old) -> None:
        lab = old.cloud.lab
        here, there = lab.hosts
        with versions.not_upgraded(here):
            calls = [
                *refusal.calls(old, "h1", "run", "off", REFUSED),
                *refusal.moves(old, "h1", "h2", "live", "off"),
            ]
            assert judged(old, calls) == []
        with versions.not_upgraded(there):
            calls = [
                call for call in refusal.moves(old, "h1", "h2", "live", "off") if "h2" in " ".join(call.words)
            ]
            # That one sees that the VM runs where it would remove it.
            calls = [call for call in calls if call.action != "postmigrate"]
            vm = old.vms["undeployed"]
            directory = old.cloud.vm_dir(vm)
            tail = (str(vm), str(SYSTEM))
            calls.append(refusal.Call("mv", (f"fe:{directory}", f"h2:{directory}", *tail), vm))
            calls.append(refusal.Call("delete", (f"h2:{directory}", *tail), vm))
            assert judged(old, calls) == []

    def test_front_end_of_the_older_version_is_refused_in_one_line(self, old: Old) -> None:
        """What that front-end does before it asks a host is its own affair; no host does anything for it."""
        with versions.not_upgraded(old.cloud.lab.fe):
            calls = [
                *refusal.calls(old, "h1", "run", "off", ("in-place", "overlay")),
                *refusal.moves(old, "h1", "h2", "live", "off"),
            ]
            assert judged(old, calls) == []

    def test_what_a_host_refused_is_done_when_it_is_synced(self, old: Old) -> None:
        """Through oned: what it began goes on with a retry."""
        oned, lab = old.cloud.oned, old.cloud.lab
        image = old.image("retried", "in-place", old.formats[0])
        vm = oned.vm_create(
            old.cloud.template("retried", [{"IMAGE_ID": str(old.images["os"])}, {"IMAGE_ID": str(image)}])
        )
        run, kept = old.vms["run"], old.disks("run")
        extra = oned.disk_attach(run, old.images[f"overlay {old.formats[0]}"])
        target = oned.vm(run).disks[-1]["TARGET"]
        with versions.not_upgraded(lab.hosts[0]):
            with pytest.raises(ActionFailed, match=SYNC):
                oned.vm_deploy(vm, "h1", SYSTEM)
            with pytest.raises(ActionFailed, match=SYNC):
                oned.vm_migrate(old.vms["live"], "h2", how="live")
            with pytest.raises(ActionFailed, match=SYNC):
                oned.disk_snapshot_create(run, 1, "refused")
            with pytest.raises(ActionFailed, match=SYNC):
                oned.disk_detach(run, extra)
            assert oned.state(old.vms["live"]) == ("ACTIVE", 3)
            # What the hypervisor does alone needs no front-end.
            oned.vm_suspend(old.vms["live"])
            oned.vm_reboot(run, hard=True)
            for disk in kept:
                old.check_disk(old.cloud.guest(run), disk, "two")
        # The guest had lost that disk when the transfer action refused.
        assert target not in old.cloud.guest(run).disks()
        oned.disk_detach(run, extra)
        oned.vm_recover(vm, "retry")
        old.cloud.guest(vm).check("vdb", "base", 0, KIB)
        with versions.not_upgraded(lab.hosts[0]), pytest.raises(ActionFailed, match=SYNC):
            oned.vm_terminate(vm, hard=True)
        oned.vm_recover(vm, "retry")
        assert oned.state(vm)[0] == "DONE"
        oned.image_delete(image)
        oned.vm_resume(old.vms["live"])
        old.check("live")

    def test_host_that_was_not_synced_is_in_nobody_elses_way(self, old: Old) -> None:
        """A base that it has is not asked for; the operator's commands name it and go on."""
        lab, oned = old.cloud.lab, old.cloud.oned
        image = old.image("far", "overlay", old.formats[0])
        vm = old.cloud.deploy("far", [{"IMAGE_ID": str(image)}], "h2")
        with versions.not_upgraded(lab.hosts[1]):
            disk = oned.disk_attach(old.vms["run"], image)
            target = oned.vm(old.vms["run"]).disks[-1]["TARGET"]
            guest = old.cloud.guest(old.vms["run"])
            guest.wait_disk(target)
            guest.check(target, "base", 0, KIB)
            oned.disk_detach(old.vms["run"], disk)
            done = lab.fe.run([COMMAND, "doctor", "--json"], check=False)
            findings = [item for item in json.loads(done.stdout)["findings"] if item["machine"] == "h2"]
            assert done.returncode == 2 and [SYNC in item["mend"] for item in findings] == [True], findings
            for words in (
                ["gc", "--dry-run"],
                ["base", "list"],
                ["stage", str(image), "--hosts", "h1,h2"],
                ["status"],
            ):
                done = lab.fe.run([COMMAND, *words], check=False)
                assert b"Traceback" not in done.stderr + done.stdout
                assert SYNC in (done.stderr + done.stdout).decode(), (words, done)
        old.cloud.terminate(vm)
        oned.image_delete(image)

    # -- all machines upgraded -------------------------------------------------------------------------

    def test_bases_are_adopted_and_not_fetched_again(self, old: Old) -> None:
        host = old.cloud.lab.node("h1")
        before, calls = old.bases(host), len(old.cloud.oned.calls)
        assert len(before) >= 1 + len([format for place, format in old.mixed() if place == "overlay"])
        attach_and_detach(old, ("overlay", "store-clone"))
        assert "clone" in {call.action for call in old.cloud.oned.calls[calls:]}
        assert "read from the store" not in said(old, calls, "clone")
        assert old.bases(host) == before
        done = old.cloud.lab.fe.run([COMMAND, "base", "verify"], check=False, timeout=300)
        assert done.returncode == 0, done
        assert old.bases(host) == before

    def test_vm_that_ran(self, old: Old) -> None:
        """Snapshots, save-as, backup, growth and attachments of a guest that has run since before the
        upgrade.
        """
        oned, vm = old.cloud.oned, old.vms["run"]
        guest = old.check("run")
        kept = old.kept("run")
        snapshots = {disk: (0, oned.disk_snapshot_create(vm, disk.id, "new")) for disk in kept}
        for disk in old.disks("run"):
            guest.write(disk.target, "three", 1024, 64)
        for disk in kept:
            for snapshot, seed in zip((*snapshots[disk], -1), ("one", "two", "three")):
                image = oned.disk_saveas(vm, disk.id, f"run-{disk.id}-{snapshot}", snapshot=snapshot)
                old.check_stored(image, disk.format, seed)
                oned.image_delete(image)
        # Of the first half the older version's snapshot goes, of the others this one's.
        for number, disk in enumerate(kept):
            oned.disk_snapshot_delete(vm, disk.id, snapshots[disk][number % 2])
        if not roots.LIBVIRT_7_0:
            self.back_up(old, "run", "_live", "three")
        for disk in old.disks("run"):
            oned.disk_resize(vm, disk.id, 24)
        assert {guest.disks()[disk.target] for disk in old.disks("run")} == {24 << 20}
        attach_and_detach(old)
        old.check("run", "three")
        oned.vm_poweroff(vm, hard=True)
        for number, disk in enumerate(kept):
            oned.disk_snapshot_revert(vm, disk.id, snapshots[disk][1 - number % 2])
        oned.vm_resume(vm)
        guest = old.cloud.guest(vm)
        for number, disk in enumerate(kept):
            old.check_disk(guest, disk, "one" if number % 2 else "two")
            guest.write(disk.target, "end", 1024, 64)
        oned.vm_migrate(vm, "h2", how="poweroff-hard", datastore_id=OTHER_SYSTEM)
        guest = old.cloud.guest(vm)
        for disk in kept:
            old.check_disk(guest, disk, "end")
        old.end("run", "end")

    def back_up(self, old: Old, name: str, live: str, seed: str) -> None:
        """Back up a VM and see what the copies have; after that nothing of it is left."""
        vm, host = old.vms[name], old.cloud.lab.node("h1")
        disks = old.disks(name)
        words = (":".join(str(disk.id) for disk in disks), f"one-{vm}", "-", str(vm), str(SYSTEM))
        before = old.cloud.files(host, old.cloud.vm_dir(vm))
        old.cloud.tm(f"prebackup{live}", vm, *words)
        for disk in disks:
            path = f"{old.cloud.vm_dir(vm)}/backup/disk.{disk.id}.0"
            assert old.cloud.read(path, "qcow2", 64 << 10, 1024 << 10, node=host) == content(
                seed, 1024, 64
            ), disk
        old.cloud.tm(f"postbackup{live}", vm, *words)
        assert old.cloud.files(host, old.cloud.vm_dir(vm)) == before

    def test_vm_that_was_off(self, old: Old) -> None:
        """Two snapshots, one made live and one off: save-as, backup and restore, back, growth, a move, and it
        runs.
        """
        oned, vm = old.cloud.oned, old.vms["off"]
        kept, host = old.kept("off"), old.cloud.lab.node("h1")
        for disk in kept:
            for snapshot, seed in ((0, "one"), (1, "two"), (-1, "two")):
                image = oned.disk_saveas(vm, disk.id, f"off-{disk.id}-{snapshot}", snapshot=snapshot)
                old.check_stored(image, disk.format, seed)
                oned.image_delete(image)
        for number, disk in enumerate(kept):
            oned.disk_snapshot_delete(vm, disk.id, number % 2)
            assert oned.disk_snapshot_create(vm, disk.id, "new") == 2
            oned.disk_resize(vm, disk.id, 24)
        oned.vm_migrate(vm, "h2")
        assert old.cloud.files(host, old.cloud.vm_dir(vm)) == []
        oned.vm_migrate(vm, "h1")
        oned.vm_resume(vm)
        guest = old.check("off")
        for disk in kept:
            guest.write(disk.target, "three", 1024, 64)
        oned.vm_poweroff(vm, hard=True)
        for number, disk in enumerate(kept):
            oned.disk_snapshot_revert(vm, disk.id, 1 - number % 2)
        self.restored(old, vm, kept)

    def restored(self, old: Old, vm: int, kept: Sequence[Disk]) -> None:
        """See that a VM is at the older version's snapshots; back it up, have it write, and restore it."""
        oned = old.cloud.oned
        tail = (f"one-{vm}", "-", str(vm), str(SYSTEM))
        words = (":".join(str(disk.id) for disk in kept), *tail)
        # What restore puts back has no snapshots.
        for number, disk in enumerate(kept):
            for snapshot in (1 - number % 2, 2):
                oned.disk_snapshot_delete(vm, disk.id, snapshot)
        old.cloud.tm("prebackup", vm, *words)
        with backed_up(old, vm) as backup:
            old.cloud.tm("postbackup", vm, *words)
            oned.vm_resume(vm)
            guest = old.cloud.guest(vm)
            for number, disk in enumerate(kept):
                old.check_disk(guest, disk, "one" if number % 2 else "two")
                guest.write(disk.target, "lost", 1024, 64)
            oned.vm_poweroff(vm, hard=True)
            old.cloud.tm("restore", vm, str(vm), str(backup), "-1", "-1")
        oned.vm_resume(vm)
        guest = old.cloud.guest(vm)
        for number, disk in enumerate(kept):
            old.check_disk(guest, disk, "one" if number % 2 else "two")
            guest.write(disk.target, "end", 1024, 64)
        old.end("off", "end")

    def test_vm_that_was_suspended(self, old: Old) -> None:
        """Its memory names files as the older version had them; a snapshot goes and one comes before it
        wakes.
        """
        oned, vm = old.cloud.oned, old.vms["suspended"]
        kept = old.kept("suspended")
        for disk in kept:
            assert oned.disk_snapshot_create(vm, disk.id, "asleep") == 1
        for disk in kept[::2]:
            oned.disk_snapshot_delete(vm, disk.id, 0)
        oned.vm_resume(vm)
        guest = old.check("suspended")
        for disk in kept:
            guest.write(disk.target, "three", 1024, 64)
        # It sleeps again, and wakes up elsewhere.
        oned.vm_migrate(vm, "h2", how="save")
        old.cloud.guest(vm)
        for disk in kept:
            old.check_disk(old.cloud.guest(vm), disk, "three")
        oned.vm_poweroff(vm, hard=True)
        for number, disk in enumerate(kept):
            oned.disk_snapshot_revert(vm, disk.id, 0 if number % 2 else 1)
        oned.vm_resume(vm)
        guest = old.cloud.guest(vm)
        for number, disk in enumerate(kept):
            old.check_disk(guest, disk, "one" if number % 2 else "two")
            guest.write(disk.target, "end", 1024, 64)
        old.end("suspended", "end")

    def test_vm_that_was_stopped(self, old: Old) -> None:
        """Its files are on the front-end, without bases: save-as there, then it goes on where it was."""
        oned, vm = old.cloud.oned, old.vms["stopped"]
        for disk in old.kept("stopped"):
            for snapshot, seed in ((0, "one"), (-1, "two")):
                image = oned.disk_saveas(vm, disk.id, f"stopped-{disk.id}-{snapshot}", snapshot=snapshot)
                old.check_stored(image, disk.format, seed)
                oned.image_delete(image)
        oned.vm_resume(vm)
        oned.vm_deploy(vm, "h2", SYSTEM)
        guest = old.check("stopped")
        for disk in old.kept("stopped"):
            oned.disk_snapshot_delete(vm, disk.id, 0)
            guest.write(disk.target, "end", 1024, 64)
        old.end("stopped", "end")

    def test_vm_that_was_undeployed(self, old: Old) -> None:
        oned, vm = old.cloud.oned, old.vms["undeployed"]
        disks = old.disks("undeployed")
        for disk in disks:
            oned.disk_resize(vm, disk.id, 24)
        oned.vm_deploy(vm, "h1", SYSTEM)
        guest = old.check("undeployed")
        assert {guest.disks()[disk.target] for disk in disks} == {24 << 20}
        oned.vm_stop(vm)
        oned.vm_resume(vm)
        oned.vm_deploy(vm, "h2", OTHER_SYSTEM)
        guest = old.check("undeployed")
        oned.vm_poweroff(vm, hard=True)
        for disk in old.kept("undeployed"):
            oned.disk_snapshot_revert(vm, disk.id, 0)
        oned.vm_undeploy(vm)
        self.end_on_the_front_end(old)

    def end_on_the_front_end(self, old: Old) -> None:
        """Terminate an undeployed VM: its files are not on its last host."""
        old.end("undeployed", "one")
        for node in (old.cloud.lab.fe, *old.cloud.lab.hosts):
            for system in (SYSTEM, OTHER_SYSTEM):
                assert not [
                    name for name in old.cloud.files(node, f"{DATASTORES}/{system}") if "undeployed" in name
                ]

    def test_vm_with_all_disks_in_place_is_migrated_live(self, old: Old) -> None:
        oned, vm = old.cloud.oned, old.vms["live"]
        guest = old.check("live")
        target = old.disks("live")[0].target
        guest.loop(target, "loop", 4096, 2048)
        for host in ("h2", "h1"):
            oned.vm_migrate(vm, host, how="live")
            assert oned.state(vm)[1] == 3
            guest = old.cloud.guest(vm)
        counts = guest.loop_stop(target)
        assert (counts["errors"], counts["mismatches"]) == (0, 0) and counts["writes"] > 10
        assert old.cloud.files(old.cloud.lab.node("h2"), old.cloud.vm_dir(vm)) == []
        old.check("live")
        old.end("live", "two")

    def test_image_with_snapshots(self, old: Old) -> None:
        oned, image = old.cloud.oned, old.images["idle"]
        format = old.formats[-1]
        old.check_stored(image, format, "three")
        oned.image_snapshot(image, "snap_revert", 0)
        old.check_stored(image, format, "one")
        oned.image_snapshot(image, "snap_delete", 0)
        oned.image_snapshot(image, "snap_revert", 1)
        old.check_stored(image, format, "two")
        copy = oned.image_clone(image, "copied")
        old.check_stored(copy, format, "two")
        oned.image_snapshot(image, "snap_flatten", 1)
        old.check_stored(image, format, "two")
        oned.image_persistent(image, False)
        vm = old.cloud.deploy(
            "flipped",
            [{"IMAGE_ID": str(old.images["os"])}, {"IMAGE_ID": str(image)}, {"IMAGE_ID": str(copy)}],
        )
        guest = old.cloud.guest(vm)
        for name in ("vdb", "vdc"):
            guest.check(name, "two", 1024, 64)
        old.cloud.terminate(vm)
        for number in (image, copy):
            oned.image_delete(number)

    def test_nothing_is_left(self, old: Old) -> None:
        """The operator's commands find nothing; the images that are left can be deleted."""
        lab = old.cloud.lab
        assert [old.cloud.oned.state(vm)[0] for vm in old.vms.values()] == [], "VMs of tests that have failed"
        done = lab.fe.run([COMMAND, "gc", "--dry-run", "--now", "--json"], check=False)
        rows = json.loads(done.stdout)
        # Of images that were deleted above; nothing of a VM.
        assert (
            rows["errors"] == []
            and {row["reason"].partition("image")[2].lstrip(" 0123456789") for row in rows["findings"]}
            <= GONE
        )
        done = lab.fe.run([COMMAND, "doctor", "--json"], check=False)
        findings = json.loads(done.stdout)["findings"]
        assert (done.returncode, lab.unexplained(findings)) == (1 if findings else 0, [])
        assert old.cloud.leftovers() == []
        for image in sorted(old.cloud.oned.images):
            old.cloud.oned.image_delete(image)
        lab.fe.run([COMMAND, "gc", "--now"])
        lab.fe.run([COMMAND, "gc", "--dry-run", "--now"])
        assert [old.bases(host) for host in lab.hosts] == [{}, {}]
        if self.kind == "rbd":
            assert lab.ceph.images() == {}
        left = old.cloud.files(lab.fe, f"{DATASTORES}/{old.store}")
        assert [
            name
            for name in left
            if not re.match(r"\.semishared(/store|/\.uploads(\.lock)?)?$|\.monitor$", name)
        ] == []
