# SPDX-License-Identifier: Apache-2.0
"""With which ciphers ssh carries bulk data: only such as it may use, the quickest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semishared.tools import compress
from semishared.wire.ssh import QUICKEST, ciphers_by_cost

OTHERS = ["chacha20-poly1305@openssh.com", "aes128-ctr", "aes256-ctr"]


@given(st.lists(st.sampled_from([*QUICKEST, *OTHERS]), unique=True))
def test_what_is_allowed_stays_allowed_and_nothing_else_is(allowed: list[str]) -> None:
    found = ciphers_by_cost(allowed)
    assert sorted(found) == sorted(allowed)
    assert [name for name in found if name in OTHERS] == [name for name in allowed if name in OTHERS], (
        "the order is ssh's"
    )
    quick = [name for name in QUICKEST if name in allowed]
    assert found[: len(quick)] == quick


def test_only_a_network_of_one_gigabit_or_less_is_worth_a_compressor() -> None:
    assert compress.pays(117e6) and compress.pays(1e6) and not compress.pays(300e6)
