# SPDX-License-Identifier: Apache-2.0
"""What unpacking may cost; the time of the processor is made up."""

from __future__ import annotations

import time

import pytest

from semishared.errors import SourceTooSlow
from semishared.intake import unpack


def test_what_unpacking_may_cost_grows_with_what_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "process_time", lambda: now[0])
    work = unpack.Work(unpack.LEAST_S + 5)
    now[0] += unpack.LEAST_S + 2.5
    for _ in range(2):
        with pytest.raises(SourceTooSlow):
            work.came(1 << 20)
    work.came(1 << 20)
    now[0] += 4
    with pytest.raises(SourceTooSlow, match=f"and {11 << 20} bytes of it cost more than 8 s"):
        work.came(8 << 20)
