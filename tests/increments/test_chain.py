# SPDX-License-Identifier: Apache-2.0
"""Increments of a VM with disks of every kind: each restores what the guest had written, and has what changed
alone where the disk has a mark.
"""

from __future__ import annotations

import pytest

from .rig import Rig


@pytest.mark.fault(86, "an increment restores what the guest had written, of every kind of disk")
def test_increments_of_every_kind_of_disk(rig: Rig) -> None:
    kept = rig.kept
    rig.model.write("zero", 2048, 64)
    kept.back_up()
    for number in (1, 2):
        rig.model.write(f"inc{number}", 1024 + 512 * number, 128)
        kept.back_up(freeze="SUSPEND")
        assert not kept.whole[number]
    # A backup that the store does not get: oned asks for the same again.
    rig.model.write("lost", 4096, 64)
    kept.back_up(stores=False)
    rig.model.write("after", 5120, 64)
    kept.back_up()
    assert not kept.whole[3]
    # Off: what is marked there counts when the guest runs again.
    rig.model.write("before-off", 512, 64)
    rig.cloud.oned.vm_poweroff(rig.vm, hard=True)
    kept.back_up(live=False)
    assert not kept.whole[4]
    kept.back_up(live=False)
    rig.cloud.oned.vm_resume(rig.vm)
    rig.model.write("on-again", 256, 64)
    kept.back_up()
    assert not kept.whole[6]
    kept.check()
    assert max(kept.sizes[6].values()) < 1024, kept.sizes[6]
