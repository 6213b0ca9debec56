# SPDX-License-Identifier: Apache-2.0
"""What comes first is told by counters: a machine whose clock is a day off loses nothing and stops nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from semishared.errors import LateAction, VmGone
from semishared.model import steps as s
from semishared.tools import files
from tools.world import World, qemu_io


def staged_by_another_process(world: World, *through: str) -> str:
    """Return the name under which a process that has ended would have staged an image."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from semishared.tools import files; "
        "print(files.staged_name(sys.argv[2]))"
    )
    lib = str(Path(files.__file__).parents[2])
    argv = [*through, sys.executable, "-I", "-c", program, lib, str(world.store / "image")]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.fault(13, "a front-end whose clock was a day ahead does not lock a VM out of its host")
def test_deletion_by_a_clock_that_was_a_day_ahead_stops_nothing_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, disk, now = world.image(), world.disk(), time.time
    world.clone(image, disk)
    monkeypatch.setattr(time, "time", lambda: now() + 86400)
    world.on(s.RemoveVm(5, disk.vm_dir))
    world.on(s.RemoveDisk(world.disk(5, 1), ""))
    monkeypatch.undo()
    qemu_io(world.clone(image, disk), "qcow2", "read -P 0xa1 1M 64k")


@pytest.mark.fault(
    46, "a clock that was set ahead makes nobody forget what was deleted: what is late stays so"
)
def test_clock_that_is_set_ahead_forgets_no_deletion(world: World) -> None:
    image, disk, other = world.image(), world.disk(5), world.disk(6)
    with world.begun(disk) as late:
        world.on(s.PrepareVm(disk.vm, disk.vm_dir), s.RemoveVm(disk.vm, disk.vm_dir), seq=3)
        # To a clock that is set three days ahead by now, the lock file is that old.
        os.utime(world.root / "locks" / "vm-5", (time.time() - 3 * 86400,) * 2)
        world.on(s.PrepareVm(other.vm, other.vm_dir), s.RemoveVm(other.vm, other.vm_dir), seq=1)
        with pytest.raises(VmGone):
            late(s.PrepareVm(disk.vm, disk.vm_dir), s.CopyImage(disk, image, 0))
    with pytest.raises(LateAction):
        world.on(s.PrepareVm(disk.vm, disk.vm_dir), seq=2)


@pytest.mark.fault(13, "what another machine is writing now is not stale, whatever the clock says")
def test_what_is_being_staged_on_another_machine_is_left_alone_a_day_ahead(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other machine is one of another name: its processes cannot be looked for here."""
    theirs = staged_by_another_process(
        world, "unshare", "--uts", "sh", "-c", 'hostname other; exec "$@"', "sh"
    )
    mine = files.staged_name(str(world.store / "image"))
    for name in (theirs, mine):
        with open(name, "xb") as file:
            file.write(b"being written")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 2 * 86400)
    files.remove_stale(str(world.store))
    assert os.path.exists(theirs)
    assert os.path.exists(mine), "its writer, this process, lives"


def test_what_an_ended_process_of_this_machine_staged_is_stale_at_once(world: World) -> None:
    left = staged_by_another_process(world)
    older = str(world.store / ".staged-image.0123456789ab")
    for name in (left, older):
        with open(name, "xb") as file:
            file.write(b"left")
    os.utime(older, (1, 1))
    files.remove_stale(str(world.store))
    assert not os.path.exists(left)
    assert os.path.exists(older), "whose it is its name does not say: gc asks all machines"
