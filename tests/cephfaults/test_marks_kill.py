# SPDX-License-Identifier: Apache-2.0
"""A backup of a disk on Ceph is killed after each kind of its effects, and made again from the same one: it
has what changed alone, restores what the disk held, and leaves two marks and nothing else.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import List

import pytest

from semishared.errors import SemisharedError
from tools.ceph_chain import Chain
from tools.ceph_site import Site
from tools.world import World

from .conftest import WATCH_S
from .test_kill import ALL, AT_ONCE, run, traced


def begun(site: Site, top: Path, number: int) -> Chain:
    """Return a VM of which two backups are stored, and whose disk has changed since."""
    top.mkdir()
    chain = Chain(site, World(top / "world"), top, number=number)
    for _ in range(2):
        chain.write()
        chain.back_up()
    chain.write()
    return chain


@pytest.mark.fault(90, "an increment of a disk on Ceph has what changed alone")
def test_increment_that_was_killed_is_made_again_from_the_same_one(site: Site, tmp_path: Path) -> None:
    first = begun(site, tmp_path / "first", 100)
    trace = tmp_path / "trace"
    passed = traced(run([first.step()], SEMISHARED_TRACE=str(trace)), trace)
    assert {"marks noted", "snapshot removed", "snapshot made", "disk copied"} <= set(passed), passed
    wanted = [at for at, point in enumerate(passed, 1) if ALL or point not in passed[: at - 1]]
    chains = {at: begun(site, tmp_path / str(at), 100 + at) for at in wanted}

    def killed(at: int) -> List[str]:
        chain = chains[at]
        if run([chain.step()], SEMISHARED_KILL_AT=str(at)).returncode == 0:
            return ["it was not killed"]
        chain.write()
        try:
            chain.back_up()
            chain.write()
            chain.back_up()
            chain.check()
        except (SemisharedError, AssertionError) as e:
            return [f"after {at} {passed[at - 1]}: {e}"]
        wrong = [f"after {at} {passed[at - 1]}: {why}" for why in chain.whole if why]
        left = sorted(
            path.name for path in Path(chain.disk.vm_dir).iterdir() if not path.name.startswith(".")
        )
        return wrong + ([f"after {at}: {chain.marks()} {left}"] if len(chain.marks()) != 2 or left else [])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [what for row in pool.map(killed, wanted) for what in row]
    assert not found, "\n".join(found)
    assert site.held_after(WATCH_S + 50) == {}
