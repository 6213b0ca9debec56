# SPDX-License-Identifier: Apache-2.0
"""The matrix of cells: complete, and none left out without a reason."""

from __future__ import annotations

import math

import pytest

import matrix
from semishared.model.disk.place import PLACES


def test_every_cell_works_or_says_why_not() -> None:
    axes = (matrix.ACTIONS, matrix.PLACES, matrix.FORMATS, matrix.MODES, matrix.DEVICES)
    assert len(matrix.CELLS) == math.prod(map(len, axes))
    assert all(len(matrix.reason(cell)) > 20 for cell in matrix.CELLS if matrix.reason(cell))


def test_every_place_has_its_cells() -> None:
    assert set(matrix.PLACES) == set(PLACES)


def test_missing_cells_are_named_and_marked() -> None:
    every = [cell for cell in matrix.CELLS if matrix.must_report(cell)]
    assert matrix.missing(every) == []
    assert "X " not in matrix.table(every).replace("X NOT", "")
    lost = ("snap_revert", "copy", "qcow2", "off", "pool")
    assert matrix.missing(set(every) - {lost}) == [lost]
    (line,) = [
        line
        for line in matrix.table(set(every) - {lost}).splitlines()
        if line.startswith("snap_revert    copy")
    ]
    assert line.split()[2:] == ["o", "o", "o", ".", ".", ".", "o", "X", "o", ".", ".", "."]


def test_report_of_what_does_not_exist_is_an_error() -> None:
    assert set(matrix.expand("clone", "copy", ("raw", "qcow2"), "off")) == {
        ("clone", "copy", f, "off", "plain") for f in ("raw", "qcow2")
    }
    assert list(matrix.expand("clone", "copy", "raw", "off", "pool")) == [
        ("clone", "copy", "raw", "off", "pool")
    ]
    with pytest.raises(ValueError, match="no cell"):
        list(matrix.expand("clone", "copied", "raw", "off"))
    with pytest.raises(ValueError, match="cannot be proved"):
        list(matrix.expand("snap_revert", "copy", "raw", "live"))
    with pytest.raises(ValueError, match="lies on the store"):
        list(matrix.expand("clone", "in-place", "raw", "off", "pool"))
