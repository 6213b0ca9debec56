# SPDX-License-Identifier: Apache-2.0
"""A share, or a store, that hangs so that even SIGKILL ends nobody in it: the action ends, and whoever reads
what it says is told so.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from semishared.errors import MissingImage
from semishared.tools import hung_store
from system.test_monitoring import HANG
from tools.test_hung_device import HOLD, LIB

ASK = """
import sys
sys.path.insert(0, {lib!r})
from semishared.errors import SemisharedError
from semishared.model.vm.hypervisor_steps import CheckShare
from semishared.tools import ending, hung_store
from semishared.vmm.on_host import check_share
hung_store.LIMIT_S = 1.0
try:
    check_share(CheckShare(7, {source!r}, False, ""), "scripts")
except SemisharedError as e:
    print(e.line(), file=sys.stderr)
ending.ended(1)
"""

LOOK = """
import os, sys
sys.path.insert(0, {lib!r})
from functools import partial
from semishared.cli import same_directories
from semishared.host import leftovers
from semishared.model.leftover_steps import LookAround
from semishared.tools import ending, hung_store
quick = partial(hung_store.unless_it_hangs, limit_s=0.5)
leftovers.unless_it_hangs = same_directories.unless_it_hangs = quick
store, other = {stores!r}
with same_directories.tokens([store, other]) as token:
    print(os.listdir(other) == [token])
for marker in ("0" * 32, ""):
    found = leftovers.look_around(LookAround({location!r}, (101,), (store, other), False, (marker, "")))
    print(len(found.stores), *(refused.id + ": " + refused.detail for refused in found.refused))
sys.stdout.flush()
ending.ended(1)
"""


LEAVE = """
import sys
sys.path.insert(0, {lib!r})
from semishared.disk import backup_marks
from semishared.model.disk.place import IN_PLACE
from semishared.model.disk.record import Record
from semishared.tools import ending, hung_store
hung_store.LIMIT_S = 1.0
backup_marks.leave(7, {vm_dir!r}, Record(1, IN_PLACE, "qcow2", {image!r}))
print("left", flush=True)
ending.ended(0)
"""


def said_while_it_hangs(root: Path, program: str) -> str:
    """Run a program while `root`, which is made, hangs; return what it says, when nobody can say more."""
    root.mkdir()
    with subprocess.Popen(["/usr/bin/python3", "-c", HOLD, root], stdout=subprocess.PIPE) as server:
        assert server.stdout
        asked = None
        try:
            assert server.stdout.readline() == b"mounted\n"
            words = ["/usr/bin/python3", "-c", program]
            asked = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            return asked.communicate(timeout=20)[0].decode()
        finally:
            server.kill()
            subprocess.run(["umount", "-l", root], check=True)
            if asked:
                asked.wait(10)


def test_marks_in_an_image_hold_no_removal_up_while_its_store_hangs(tmp_path: Path) -> None:
    store, vm_dir = tmp_path / "store", tmp_path / "7"
    (vm_dir / ".semishared").mkdir(parents=True)
    (vm_dir / ".semishared" / "marks.json").write_text('{"version": 1, "marks": []}')
    leave = LEAVE.format(lib=LIB, vm_dir=str(vm_dir), image=f"{store}/image")
    assert said_while_it_hangs(store, leave) == "left\n"


def test_a_deploy_ends_while_its_share_hangs(tmp_path: Path) -> None:
    root = tmp_path / "shares"
    said = said_while_it_hangs(root, ASK.format(lib=LIB, source=f"{root}/share-7"))
    assert "share-7" in said and "hangs: no answer within 1 s" in said and "SS024" in said


def test_doctor_and_gc_go_on_where_a_store_of_the_front_end_hangs(tmp_path: Path) -> None:
    """Its server is away; another store is well. With and without an id: its marker is read, or the directory
    itself.
    """
    hangs, well = tmp_path / "datastores/100", tmp_path / "datastores/102"
    for path in (hangs, well):
        path.mkdir(parents=True)
    look = LOOK.format(lib=LIB, stores=(str(hangs), str(well)), location=str(tmp_path / "datastores"))
    with subprocess.Popen(["/usr/bin/python3", "-c", HANG, hangs], stdout=subprocess.PIPE) as server:
        assert server.stdout
        try:
            assert server.stdout.readline() == b"mounted\n"
            done = subprocess.run(
                ["/usr/bin/python3", "-c", look], capture_output=True, text=True, check=False, timeout=20
            )
        finally:
            server.kill()
            subprocess.run(["umount", "-l", hangs], check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "True" and not done.stderr and not list(well.iterdir())
    assert (
        all(
            line.startswith(f"1 SS024: {hangs} on ") and "hangs: no answer within" in line
            for line in lines[1:]
        )
        and len(lines) == 3
    )


def test_what_is_asked_apart_is_what_is_answered() -> None:
    assert hung_store.unless_its_process_hangs(lambda: b"x" * (1 << 20), b"", 10) == b"x" * (1 << 20)


def test_what_is_raised_apart_is_what_is_raised() -> None:
    def look() -> int:
        raise MissingImage("share-7 is not there")

    with pytest.raises(MissingImage, match="share-7 is not there"):
        hung_store.unless_its_process_hangs(look, None, 10)
