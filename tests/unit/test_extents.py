# SPDX-License-Identifier: Apache-2.0
"""Copies by extents: the same content, holes stay holes, one content has one generation."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import Any, Iterator
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.errors import ImageChanged
from semishared.tools import extents, files, progress, write_out

EXTENT = 64 << 10
"""Smaller than the real one, so that small files have many."""
BLOCK = 4096
Piece = tuple[int, int, bytes]
pieces = st.lists(
    st.tuples(st.integers(0, 10 * EXTENT), st.integers(1, EXTENT), st.sampled_from([b"\0", b"x", b"y"])),
    max_size=5,
)


@pytest.fixture(autouse=True)
def _small_extents() -> Iterator[None]:
    with mock.patch.multiple(extents, EXTENT=EXTENT, BLOCK=BLOCK, _ZERO=bytes(EXTENT)):
        yield


def make(path: Path, size: int, written: list[Piece]) -> bytes:
    """Write pieces into a sparse file; return its content."""
    with open(path, "wb") as file:
        for at, length, byte in written:
            file.seek(at)
            file.write(byte * length)
        file.truncate(size)
    return path.read_bytes() if size < 1 << 30 else b""


def allocated(path: Path) -> int:
    """Return the bytes that are no hole; st_blocks would count the file system's own blocks (its extent tree)
    as well.
    """
    with open(path, "rb") as file:
        end, at, found = os.fstat(file.fileno()).st_size, 0, 0
        while at < end:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            found += at - start
    return found


@given(pieces, st.integers(0, 11 * EXTENT))
def test_copy_has_the_content_and_no_more_blocks_than_it_needs(written: list[Piece], size: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "source"), Path(directory, "target")
        content = make(source, size, written)
        found = extents.copy(str(source), str(target), "raw", "store_read")
        assert target.read_bytes() == content
        needed = sum(content[at : at + BLOCK].strip(b"\0") != b"" for at in range(0, size, BLOCK))
        assert allocated(target) <= needed * BLOCK
        assert (found.size, found.format) == (size, "raw")
        assert sorted(found.extents) == [
            at // EXTENT for at in range(0, size, EXTENT) if content[at : at + EXTENT].strip(b"\0")
        ]
        assert extents.parse(found.text()) == found
        assert extents.copy(str(target), None, "raw", "store_read") == found


@given(
    pieces, pieces, st.sampled_from([0, EXTENT, 3 * EXTENT + 7]), st.sampled_from([EXTENT, 3 * EXTENT + 7])
)
def test_generations_are_equal_when_and_only_when_the_content_is(
    first: list[Piece], second: list[Piece], first_size: int, second_size: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        one, two = Path(directory, "one"), Path(directory, "two")
        same = make(one, first_size, first) == make(two, second_size, second)
        generations = [extents.copy(str(path), None, "raw", "store_read").generation for path in (one, two)]
        assert (generations[0] == generations[1]) == same


def test_a_written_zero_is_a_hole_and_does_not_change_the_generation(tmp_path: Path) -> None:
    (tmp_path / "full").write_bytes(b"a" * EXTENT + bytes(3 * EXTENT))
    make(tmp_path / "sparse", 4 * EXTENT, [(0, EXTENT, b"a")])
    copies = [
        extents.copy(str(tmp_path / name), str(tmp_path / f"{name}.copy"), "raw", "store_read")
        for name in ("full", "sparse")
    ]
    assert copies[0] == copies[1]
    assert allocated(tmp_path / "full.copy") == EXTENT


def test_format_is_part_of_the_generation(tmp_path: Path) -> None:
    make(tmp_path / "image", EXTENT, [(0, 10, b"a")])
    names = {
        extents.copy(str(tmp_path / "image"), None, format, "store_read").generation
        for format in ("raw", "qcow2")
    }
    assert len(names) == 2
    assert all(len(name) == 32 and name.isalnum() for name in names)


def test_holes_are_not_read(tmp_path: Path) -> None:
    make(tmp_path / "image", 1 << 40, [(1 << 39, 10, b"a")])
    before = progress.moved["store_read"]
    found = extents.copy(str(tmp_path / "image"), str(tmp_path / "copy"), "raw", "store_read")
    assert progress.moved["store_read"] - before <= EXTENT
    assert list(found.extents) == [(1 << 39) // EXTENT]


def test_all_of_the_size_of_a_sparse_copy_is_gone_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, pieces, looked_up = 1 << 34, list[int](), list[object]()
    make(tmp_path / "image", size, [(at * EXTENT, EXTENT, b"a") for at in range(3 * extents.FLUSH)])
    real, load = write_out._sync_file_range, ctypes.CDLL

    def call(fd: int, offset: int, length: int, how: int) -> bool:
        pieces.extend([offset] * (how == write_out.WAIT_WRITE_WAIT))
        return real(fd, offset, length, how)

    def loaded(*args: Any, **more: Any) -> ctypes.CDLL:
        looked_up.append(args)
        return load(*args, **more)

    monkeypatch.setattr(write_out, "_sync_file_range", call)
    monkeypatch.setattr(ctypes, "CDLL", loaded)
    monkeypatch.setattr(files, "WINDOW", 1 << 22)
    extents.copy(str(tmp_path / "image"), str(tmp_path / "copy"), "raw", "store_read")
    assert pieces == list(range(0, size, 1 << 22)), "at its end"
    assert len(looked_up) <= 1


def test_file_system_that_knows_no_holes_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = make(tmp_path / "image", 4 * EXTENT, [(2 * EXTENT + 5, 10, b"a")])
    real = extents.copy(str(tmp_path / "image"), None, "raw", "store_read")

    def lseek(_fd: int, _offset: int, _how: int) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "lseek", lseek)
    assert extents.copy(str(tmp_path / "image"), str(tmp_path / "copy"), "raw", "store_read") == real
    monkeypatch.undo()
    assert (tmp_path / "copy").read_bytes() == content


def test_short_reads_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = make(tmp_path / "image", 2 * EXTENT, [(0, 2 * EXTENT, b"a")])
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 1000), at))
    extents.copy(str(tmp_path / "image"), str(tmp_path / "copy"), "raw", "store_read")
    monkeypatch.undo()
    assert (tmp_path / "copy").read_bytes() == content


def test_copy_does_not_overwrite(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"new")
    (tmp_path / "copy").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        extents.copy(str(tmp_path / "image"), str(tmp_path / "copy"), "raw", "store_read")
    assert (tmp_path / "copy").read_bytes() == b"old"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"",
        lambda text: text[:30],
        lambda text: text.replace(b"manifest 1", b"manifest 2"),
        lambda text: text.replace(b"extent %d" % EXTENT, b"extent 1"),
        lambda text: text + b"x y\n",
        lambda text: text + b"7\n",
        lambda text: b"\xff" + text,
        lambda text: text.replace(b"size ", b"size x"),
    ],
)
def test_manifest_that_is_none_is_refused(change: object) -> None:
    text = extents.Manifest("raw", 5 * EXTENT, {0: "a" * 64, 3: "b" * 64}).text()
    assert extents.parse(text).extents == {0: "a" * 64, 3: "b" * 64}
    with pytest.raises(ImageChanged):
        extents.parse(change(text))  # type: ignore[operator]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_image_changed(text: bytes) -> None:
    for candidate in (text, extents.Manifest("raw", 1, {}).text() + text):
        try:
            extents.parse(candidate)
        except ImageChanged:
            pass


SOUND = (
    f"semishared-manifest 1\nformat raw\nsize {3 * EXTENT - 1}\nextent {EXTENT}\n0 {'ab' * 32}\n2 "
    f"{'cd' * 32}\n"
)


@pytest.mark.parametrize(
    ("was", "is_now"),
    [
        ("0 ab", "-1 ab"),
        ("0 ab", "+0 ab"),
        ("0 ab", "0_0 ab"),
        ("0 ab", " ab"),
        ("2 cd", "3 cd"),
        ("2 cd", f"{1 << 70} cd"),
        ("ab", "zz"),
        ("abab", ""),
        ("abab", "ababab"),
        (f"size {3 * EXTENT - 1}", "size -1"),
        (f"size {3 * EXTENT - 1}", "size 0"),
        ("manifest 1", "manifest 2"),
        (f"extent {EXTENT}", "extent 1"),
        ("2 cd", "2"),
        ("format raw", "format"),
    ],
)
def test_manifest_that_names_what_cannot_be_is_none(was: str, is_now: str) -> None:
    """It is named by its hash; but whoever makes one up can name that, too."""
    assert sorted(extents.parse(SOUND.encode()).extents) == [0, 2]
    with pytest.raises(ImageChanged):
        extents.parse(SOUND.replace(was, is_now, 1).encode())


def test_manifest_of_nothing_has_no_extents() -> None:
    assert extents.parse(extents.Manifest("raw", 0, {}).text()) == extents.Manifest("raw", 0, {})
