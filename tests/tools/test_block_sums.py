# SPDX-License-Identifier: Apache-2.0
"""What has changed in an image is found by the sums of its blocks, whatever changed it."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path
from typing import List, Set

import pytest

from semishared.tools import block_sums, copy_on_read, qemu_img
from semishared.tools.block_sums import BLOCK

SIZE = 21 * (1 << 20) + 4096
"""More than two windows, and no whole block at the end."""
PIECES = (512, 4096, BLOCK, 5 * BLOCK)


def written(path: Path, by: random.Random) -> None:
    """Write and punch holes here and there; QEMU sees a hole from 4 KiB on."""
    with path.open("r+b") as file:
        for _ in range(8):
            length = by.choice(PIECES)
            at = by.randrange(0, (SIZE - length) // 512) * 512
            if by.random() < 0.4:
                words = ["fallocate", "--punch-hole", "-o", str(at), "-l", str(length), str(path)]
                subprocess.run(words, check=True)
            else:
                os.pwrite(file.fileno(), by.choice([by.randbytes(length), bytes(length)]), at)


def blocks(parts: List[block_sums.Part]) -> Set[int]:
    return {at // BLOCK for at, _ in parts}


def differing(one: bytes, other: bytes) -> Set[int]:
    count, size = -(-len(other) // BLOCK), max(len(one), len(other)) + BLOCK
    one, other = one.ljust(size, b"\0"), other.ljust(size, b"\0")
    return {n for n in range(count) if one[n * BLOCK : (n + 1) * BLOCK] != other[n * BLOCK : (n + 1) * BLOCK]}


@pytest.mark.parametrize("format", ["raw", "qcow2"])
@pytest.mark.parametrize("seed", range(4))
def test_changed_blocks_are_found_and_no_others(tmp_path: Path, format: str, seed: int) -> None:
    by, image = random.Random(seed), tmp_path / "image"
    image.touch()
    os.truncate(image, SIZE)
    before, seen = "", b""
    for number in range(4):
        written(image, by)
        looked, sums = str(image), tmp_path / str(number)
        if format == "qcow2":
            looked = str(tmp_path / "copy")
            qemu_img.create(looked, "qcow2", image.stat().st_size)
            qemu_img.convert_whole(str(image), "raw", looked)
        parts = block_sums.take(looked, format, str(sums), before)
        content = image.read_bytes()
        wanted = differing(seen, content) | set(range(-(-len(seen) // BLOCK), -(-len(content) // BLOCK)))
        assert blocks(parts) == wanted
        assert sums.stat().st_size == (-(-len(content) // BLOCK) + 1) * block_sums.SUM
        assert block_sums.is_whole(str(sums))
        before, seen = str(sums), content
        if number == 2:
            os.truncate(image, SIZE + 3 * BLOCK)


def test_a_copy_of_what_changed_restores_the_image(tmp_path: Path) -> None:
    by, image, first, second = random.Random(7), *(tmp_path / name for name in ("image", "first", "second"))
    image.touch()
    os.truncate(image, SIZE)
    written(image, by)
    qemu_img.convert(str(image), "raw", str(first), "qcow2")
    block_sums.take(str(image), "raw", str(tmp_path / "0"))
    written(image, by)
    parts = block_sums.take(str(image), "raw", str(tmp_path / "1"), str(tmp_path / "0"))
    qemu_img.create(str(second), "qcow2", SIZE)
    node = {"driver": "raw", "file": {"driver": "file", "filename": str(image)}}
    copy_on_read.copy(node, str(second), parts)
    qemu_img.lay_over(str(second), str(first), "qcow2")
    words = ["qemu-img", "compare", "-f", "raw", "-F", "qcow2", str(image), str(second)]
    assert subprocess.run(words, check=False).returncode == 0


def test_sums_that_are_damaged_are_none(tmp_path: Path) -> None:
    image, sums = tmp_path / "image", tmp_path / "sums"
    image.write_bytes(os.urandom(3 * BLOCK))
    block_sums.take(str(image), "raw", str(sums))
    good = sums.read_bytes()
    assert len(good) == 64 and block_sums.is_whole(str(sums))
    for bad in (good[:-1], good[:16], b"", bytes([good[0] ^ 1]) + good[1:], good + bytes(16)):
        sums.write_bytes(bad)
        assert not block_sums.is_whole(str(sums)), bad
    assert not block_sums.is_whole(str(tmp_path / "none"))
