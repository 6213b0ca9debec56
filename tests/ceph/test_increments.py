# SPDX-License-Identifier: Apache-2.0
"""Increments of a VM with disks on Ceph and on its host: each restores what the guest had written, and shows
one moment of all its disks.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Dict, Iterator, List

import pytest

from increments.kept import KIB
from increments.mixed import MIB, TARGETS, Mixed
from lab.ceph import POOL, Cluster
from lab.cloud import Cloud
from lab.guest import content

GONE = "its snapshot of that increment is gone"


@pytest.fixture(autouse=True)
def only_this_test(cloud: Cloud) -> Iterator[None]:
    yield
    cloud.delete_all()


@pytest.mark.fault(90, "an increment of a disk on Ceph has what changed alone")
def test_increments_of_a_vm_with_disks_on_ceph(
    cloud: Cloud, ceph: Cluster, os_image: int, tmp_path: Path
) -> None:
    mixed = Mixed(cloud, os_image, tmp_path, "increments")
    kept, write, vm, oned = mixed.kept, mixed.model.write, mixed.vm, cloud.oned
    write("zero", 32, 16)
    assert mixed.backed_up() == set()
    for number, freeze in enumerate(("NONE", "SUSPEND"), 1):
        write(f"inc{number}", 1024 * number, 128)
        assert mixed.backed_up(freeze=freeze) == set()
    assert sorted(mixed.marks().values()) == [2, 2]
    # The store fails: oned asks for the same again.
    write("lost", 4096, 64)
    kept.back_up(stores=False)
    write("after", 5120, 64)
    assert mixed.backed_up() == set()
    assert sorted(mixed.marks().values()) == [2, 2]
    assert max(kept.sizes[-1].values()) < 1024, kept.sizes[-1]
    # Off, and on again.
    write("before-off", 6144, 64)
    oned.vm_poweroff(vm, hard=True)
    assert mixed.backed_up(live=False) == set()
    oned.vm_resume(vm)
    write("on-again", 512, 64)
    assert mixed.backed_up() == set()
    # Elsewhere, with the guest running and without; larger.
    write("before", 7168, 64)
    oned.vm_migrate(vm, mixed.other, how="live")
    write("moved", 7424, 64)
    assert mixed.backed_up() == set()
    for place in ("in-place", "store-clone"):
        oned.disk_resize(vm, mixed.numbers[place], MIB + 4)
        mixed.model.grow(TARGETS[place], MIB + 4)
    write("grown", 8192, 64)
    assert mixed.backed_up() == set()
    oned.vm_undeploy(vm, hard=True)
    oned.vm_deploy(vm, mixed.other, oned.vm(vm).last.ds_id)
    write("deployed", 9216, 64)
    assert mixed.backed_up() == set()
    # Back to a snapshot of before the mark: what the disk has then is content of before, and Ceph's marks of
    # it are gone.
    oned.vm_poweroff(vm, hard=True)
    oned.disk_snapshot_create(vm, mixed.numbers["in-place"], "kept")
    held = mixed.model.held()
    oned.vm_resume(vm)
    write("given-up", 10240, 64)
    assert mixed.backed_up() == set()
    oned.vm_poweroff(vm, hard=True)
    oned.disk_snapshot_revert(vm, mixed.numbers["in-place"], 0)
    mixed.model.is_again(TARGETS["in-place"], held)
    oned.disk_snapshot_delete(vm, mixed.numbers["in-place"], 0)
    oned.vm_resume(vm)
    write("back", 11264, 64)
    assert mixed.backed_up() == {"in-place"}
    assert GONE in kept.whole[-1][mixed.numbers["in-place"]]
    write("next", 11520, 64)
    assert mixed.backed_up() == set()
    kept.check()
    cloud.terminate(vm)
    assert mixed.marks() == {} and cloud.left_in_pool() == [] and cloud.leftovers() == []
    source = cloud.source(mixed.images["in-place"]).removeprefix(f"{POOL}/")
    oned.image_delete(mixed.images["in-place"])
    assert source not in ceph.images()


SLOTS = (MIB - 1) * 256
"""Of 4 KiB each, from 1 MiB on."""


class Sequence:
    """A guest that writes one block after another, to one disk and to the other in turn."""

    def __init__(self, mixed: Mixed, places: List[str]) -> None:
        self._guest, self._places = mixed.cloud.guest(mixed.vm), places
        self.written, self.ends = 0, False
        self.failed: List[BaseException] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self.ends and self.written < SLOTS * len(self._places):
                place, offset = self._at(self.written)
                self._guest.write(TARGETS[place], f"seq-{place}", offset, 4)
                self.written += 1
        except BaseException as e:  # noqa: BLE001 - shown by the test
            self.failed.append(e)

    def _at(self, number: int) -> tuple[str, int]:
        return self._places[number % len(self._places)], 1024 + number // len(self._places) * 4

    def __enter__(self) -> Sequence:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ends = True
        self._thread.join(120)

    def reached(self, disks: Dict[str, bytes]) -> List[int]:
        """Return which of the blocks are in copies of the disks."""
        found = []
        for number in range(self.written + 1):
            place, offset = self._at(number)
            if disks[place][offset * KIB : (offset + 4) * KIB] == content(f"seq-{place}", offset, 4):
                found.append(number)
        return found


@pytest.mark.fault(91, "a backup of disks on Ceph and on a host shows one moment of all of them")
def test_backup_of_a_mixed_vm_shows_one_moment_of_all_its_disks(
    cloud: Cloud, os_image: int, tmp_path: Path
) -> None:
    mixed = Mixed(cloud, os_image, tmp_path, "moment")
    places = ["volatile", "in-place", "overlay", "store-clone"]
    with Sequence(mixed, places) as sequence:
        for _ in range(4):
            so_far = sequence.written
            while sequence.written < so_far + 8 and not sequence.failed:
                time.sleep(0.05)
            mixed.kept.back_up()
        last = sequence.written
    assert not sequence.failed, sequence.failed
    assert mixed.kept.whole == [{}] * 4
    reached = []
    for increment in range(4):
        disks = {place: mixed.kept.restored(increment, mixed.numbers[place]) for place in places}
        found = sequence.reached(disks)
        assert found == list(range(len(found))), f"increment {increment}: {found[-20:]}"
        reached.append(len(found))
    assert reached == sorted(set(reached)) and reached[0] > 0 and reached[-1] < last, (reached, last)
