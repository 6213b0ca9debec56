# SPDX-License-Identifier: Apache-2.0
"""Files that are read and written past the page cache: the same bytes as through it, whatever the pieces
are.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterator

import pytest

from semishared.tools import whole_pages
from store.benches import reflinking

KiB = 1024


@pytest.fixture()
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a directory that is on a block device for certain."""
    with reflinking(tmp_path) as top:
        yield top


def is_cached(path: Path, offset: int) -> bool:
    """Tell whether a page of a file can be read without waiting for its disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(4096)], offset, os.RWF_NOWAIT) == 4096
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def test_what_was_written_is_read(disk: Path) -> None:
    """Sizes and places that fit direct I/O, and others beside them, from memory that was used before, by
    several threads.
    """
    chance, buffers, path = random.Random(7), whole_pages.Buffers(), disk / "file"
    pieces, at = [], 0
    for number in range(60):
        size = chance.choice([512, 4 * KiB, 64 * KiB, 68 * KiB, 256 * KiB, 65537])
        pieces.append((at, size, number % 3 == 0, chance.randbytes(size)))
        at += size + chance.choice([0, 0, 4 * KiB, 100])
    with open(path, "w+b", 0) as opened, whole_pages.opened(opened.fileno()) as file:

        def write(piece: tuple[int, int, bool, bytes]) -> None:
            offset, size, in_two, content = piece
            with buffers.one() as memory:
                memory[:size] = content
                middle = size // 2 if in_two else size
                file.write([memory[:middle], memory[middle:size]] if in_two else [memory[:size]], offset)
                file.begin(offset, size)

        def read(piece: tuple[int, int, bool, bytes]) -> bool:
            offset, size, _, content = piece
            with buffers.one() as memory:
                return file.read(memory[:size], offset) == size and memory[:size] == content

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(write, pieces))
            assert all(pool.map(read, pieces))
        end, written = os.path.getsize(path), path.read_bytes()
        assert end == max(offset + size for offset, size, _, _ in pieces)
        with buffers.one() as memory:
            rest = end % (64 * KiB) + 64 * KiB
            start = end - rest
            assert file.read(memory, start) == rest
            assert memory[:rest] == written[start:]
    for offset, size, _, content in pieces:
        assert written[offset : offset + size] == content


def test_large_pieces_go_past_the_page_cache_of_a_disk(disk: Path) -> None:
    path = disk / "file"
    with (
        open(path, "w+b", 0) as opened,
        whole_pages.opened(opened.fileno()) as file,
        whole_pages.Buffers().one() as memory,
    ):
        file.write([memory[: 128 * KiB]], 0)
        file.write([memory[: 4 * KiB]], 128 * KiB)
        os.fsync(opened.fileno())
    assert not is_cached(path, 0)
    assert is_cached(path, 128 * KiB)


def test_a_file_that_is_on_no_disk_is_written_through_it() -> None:
    opened = os.memfd_create("test")
    try:
        with whole_pages.opened(opened) as file, whole_pages.Buffers().one() as memory:
            memory[:] = b"\x07" * len(memory)
            file.write([memory], 4096)
        assert os.pread(opened, 8, 4092) == b"\0" * 4 + b"\x07" * 4
    finally:
        os.close(opened)
