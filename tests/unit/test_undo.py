# SPDX-License-Identifier: Apache-2.0
"""The undo stack."""

from __future__ import annotations

import pytest

from semishared.tools.effects import Undo


def test_effects_are_undone_in_reverse_when_the_block_fails() -> None:
    done: list[str] = []
    with pytest.raises(ValueError, match="the cause"), Undo() as undo:
        undo.add(lambda: done.append("first"))
        undo.add(lambda: done.append("second"))
        raise ValueError("the cause")
    assert done == ["second", "first"]


def test_effects_are_undone_when_the_block_ends_without_keep() -> None:
    done: list[str] = []
    with Undo() as undo:
        undo.add(lambda: done.append("undone"))
    assert done == ["undone"]


def test_kept_effects_stay_and_later_ones_do_not() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), Undo() as undo:
        undo.add(lambda: done.append("kept"))
        undo.keep()
        undo.add(lambda: done.append("later"))
        raise KeyboardInterrupt
    assert done == ["later"]


def test_an_inverse_that_fails_stops_neither_the_others_nor_the_first_error() -> None:
    done: list[str] = []

    def fails() -> None:
        raise OSError("gone already")

    with pytest.raises(ValueError, match="the cause"), Undo() as undo:
        undo.add(lambda: done.append("first"))
        undo.add(fails)
        raise ValueError("the cause")
    assert done == ["first"]
