# SPDX-License-Identifier: Apache-2.0
"""Packed images: zstd as gz, bz2 and xz; sizes by the index of xz and the frames of zstd.

What `stat` said is held against what `cp` unpacks.
"""

from __future__ import annotations

import gzip
import lzma
import os
import resource
import subprocess
from pathlib import Path

import pytest

from images import made
from images.test_formats import arrives, assert_same
from semishared.intake import packed_size
from semishared.tools import image_headers, inspection
from tools.test_datastore import Store

MiB = 1 << 20


def packed(argv: list[str], content: bytes) -> bytes:
    return subprocess.run(argv, input=content, capture_output=True, check=True).stdout


def used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


ZSTD = {
    "one frame": ["zstd", "-q", "-1"],
    "many threads": ["zstd", "-q", "-3", "-T2", "-B1M"],
    "long distance": ["zstd", "-q", "-1", "--long=27"],
    "no checksum": ["zstd", "-q", "-1", "--no-check"],
}


@pytest.mark.parametrize("way", ZSTD)
@pytest.mark.fault(51, "zstd is unpacked, as gz, bz2 and xz are")
def test_zstd_is_unpacked(store: Store, raw: Path, way: str) -> None:
    path = store.uploads / "disk.raw.zst"
    subprocess.run([*ZSTD[way], str(raw), "-o", str(path)], check=True)
    size = store.ok("stat", PATH=path)
    assert int(size) == -(-raw.stat().st_size // MiB)
    source, format = store.cp(path, SIZE=size)
    assert (source.read_bytes(), format) == (raw.read_bytes(), "raw")


def test_zstd_of_a_pipe_tells_no_size_and_is_read(store: Store, content: bytes) -> None:
    path = store.uploads / "disk.raw.zst"
    path.write_bytes(packed(["zstd", "-q", "-1"], content))
    with inspection.content_of(str(path), "disk") as opened:
        assert packed_size.size(opened, "zstd") is None
    assert store.ok("stat", PATH=path) == "13"
    assert store.cp(path, SIZE=13)[0].read_bytes() == content


def test_qcow2_in_zstd_is_taken_for_its_disk(store: Store) -> None:
    image = store.image(format="qcow2", size=64 * MiB)
    path = store.uploads / "disk.qcow2.zst"
    subprocess.run(["zstd", "-q", str(image), "-o", str(path)], check=True)
    assert store.ok("stat", PATH=path) == "64"
    assert store.cp(path, SIZE=64)[1] == "qcow2"


def test_frames_in_a_row_are_one_file(store: Store, content: bytes, tmp_path: Path) -> None:
    frames = []
    for number in range(3):
        part = tmp_path / str(number)
        part.write_bytes(content[number * 4 * MiB : (number + 1) * 4 * MiB])
        subprocess.run(["zstd", "-q", "-1", str(part)], check=True)
        frames.append(part.with_suffix(".zst").read_bytes())
    # pzstd begins with a frame that is skipped.
    path = store.uploads / "disk.zst"
    path.write_bytes(b"\x50\x2a\x4d\x18\4\0\0\0abcd" + b"".join(frames))
    with inspection.content_of(str(path), "disk") as opened:
        assert packed_size.size(opened, "zstd") == 12 * MiB
    assert store.ok("stat", PATH=path) == "12"
    assert store.cp(path, SIZE=12)[0].read_bytes() == content[: 12 * MiB]


@pytest.mark.parametrize("share", [0.3, 0.9, 0.9999])
def test_zstd_that_is_cut_off_is_refused(store: Store, raw: Path, share: float) -> None:
    path = store.uploads / "disk.raw.zst"
    subprocess.run(["zstd", "-q", "-1", str(raw), "-o", str(path)], check=True)
    os.truncate(path, int(path.stat().st_size * share))
    store.fails("cp", "SS021", "zstd data cannot be decompressed", PATH=path, SIZE=13)


def test_zstd_bomb_is_not_unpacked_beyond_what_was_approved(store: Store) -> None:
    path = store.uploads / "bomb.zst"
    path.write_bytes(packed(["zstd", "-q", "-19"], bytes(160 * MiB)))
    assert path.stat().st_size < 64 << 10
    store.fails("cp", "SS072", "decompressed", PATH=path, SIZE=1)


def test_frame_that_lies_of_its_size_is_refused(store: Store, raw: Path) -> None:
    path = store.uploads / "disk.raw.zst"
    subprocess.run(["zstd", "-q", "-1", "--no-check", str(raw), "-o", str(path)], check=True)
    data = bytearray(path.read_bytes())
    assert data[4] >> 6 == 2, "the size has four bytes"
    at = 5 + (not data[4] & 0x20)
    data[at + 2] = 1
    path.write_bytes(data)
    for action in ("stat", "cp"):
        store.fails(action, "SS021", "zstd data cannot be decompressed", PATH=path, SIZE=13)


@pytest.mark.parametrize("threads", ["", "-T2"])
def test_size_by_the_index_of_xz(tmp_path: Path, raw: Path, threads: str) -> None:
    """Blocks, streams in a row and padding between them: as `xz -l` says."""
    path = tmp_path / "disk.xz"
    words = ["xz", "-0", "-k", "-c", "--block-size=1MiB", *([threads] if threads else [])]
    one = packed([*words, str(raw)], b"")
    for data in (one, one + bytes(8) + one, packed(["xz", "-9", "-c"], b"") + one, one * 3 + bytes(4)):
        path.write_bytes(data)
        told = subprocess.run(["xz", "--robot", "-l", str(path)], capture_output=True, check=True).stdout
        with inspection.content_of(str(path), "disk") as opened:
            assert packed_size.size(opened, "lzma") == int(told.split()[-5])


def test_size_by_the_frames_of_zstd(tmp_path: Path, raw: Path) -> None:
    """From a byte to all of it, by each width that a frame's header has for a size."""
    content = raw.read_bytes()
    for size in (0, 1, 255, 256, 300, 65791, 65792, MiB, len(content)):
        plain, path = tmp_path / "plain", tmp_path / "plain.zst"
        plain.write_bytes(content[:size])
        subprocess.run(["zstd", "-q", "-f", str(plain)], check=True)
        with inspection.content_of(str(path), "disk") as opened:
            assert packed_size.size(opened, "zstd") == size


@pytest.mark.fault(51, "the size of a large xz of zeros is known by its index, for no CPU")
def test_size_of_a_large_packed_disk_costs_nothing(store: Store) -> None:
    path = store.uploads / "disk.raw.xz"
    # A disk of 24 GiB: streams of 256 MiB in a row.
    packer = lzma.LZMACompressor(preset=0)
    one = packer.compress(os.urandom(MiB) + bytes(63 * MiB))
    for _ in range(3):
        one += packer.compress(bytes(64 * MiB))
    one += packer.flush()
    path.write_bytes(one * 96)
    before = used_s()
    assert store.ok("stat", PATH=path) == str(24 << 10)
    assert used_s() - before < 3


@pytest.mark.parametrize("program", ["gzip", "bzip2", "xz", "zstd"])
def test_packed_foreign_image_is_judged_inside(store: Store, tmp_path: Path, program: str) -> None:
    image = tmp_path / "disk.qcow2"
    words = ["--object", "secret,id=k,data=abcd", "-o", "encrypt.format=aes,encrypt.key-secret=k"]
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *words, str(image), "8M"], check=True)
    path = store.uploads / "packed"
    path.write_bytes(packed([program, "-c", "-1"], image.read_bytes()))
    for action in ("stat", "cp"):
        store.fails(action, "SS074", "encrypted inside", PATH=path, SIZE=8)


@pytest.mark.parametrize("program", ["gzip", "bzip2", "xz", "zstd"])
@pytest.mark.fault(51, "a packed VHDX is taken for its disk, whose size stands 2 MiB behind its beginning")
def test_packed_vhdx_is_taken_for_its_disk(store: Store, raw: Path, program: str) -> None:
    image, path = raw.with_name("disk.vhdx"), store.uploads / "disk.vhdx.packed"
    image.write_bytes(made.vhdx(raw.read_bytes()))
    assert_same(raw, image, "vhdx")
    path.write_bytes(packed([program, "-c", "-1"], image.read_bytes()))
    arrives(store, path, raw)


@pytest.mark.parametrize("program", ["gzip", "xz"])
def test_packed_vhdx_is_judged_inside(store: Store, content: bytes, program: str) -> None:
    path, whole = store.uploads / "disk.vhdx.packed", made.vhdx(content)
    for inside, error_id, word in (
        (made.vhdx(content, parent=True), "SS021", "a parent image"),
        (made.vhdx(content, log=True), "SS077", "not closed"),
        (whole[: 100 << 10], "SS077", "its tables"),
        (whole[: 2 * MiB + 4096], "SS077", "one of its regions"),
    ):
        path.write_bytes(packed([program, "-c", "-1"], inside))
        for action in ("stat", "cp"):
            store.fails(action, error_id, word, PATH=path, SIZE=13)


def test_packed_vhdx_whose_size_stands_too_far_behind_is_taken_unpacked(store: Store, raw: Path) -> None:
    image = store.uploads / "disk.vhdx"
    image.write_bytes(made.vhdx(raw.read_bytes(), metadata_at=40 * MiB))
    arrives(store, image, raw)
    path = store.uploads / "disk.vhdx.gz"
    path.write_bytes(gzip.compress(image.read_bytes(), 1))
    store.fails("stat", "SS003", "41 MiB behind its beginning", "unpacked from a file", PATH=path)


def test_hostile_index_is_read_without_a_crash(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "disk"
    whole = lzma.compress(content[: 2 * MiB], preset=0)
    for change in (-1, -3, -5, -8, -14, -20, -24):
        changed = bytearray(whole)
        changed[change] ^= 0xFF
        path.write_bytes(changed)
        with inspection.content_of(str(path), "disk") as opened:
            told = packed_size.size(opened, "lzma")
            assert told is None or told >= 0
    for data in (b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfd" + b"\xff" * 40, b"\x50\x2a\x4d\x18" + b"\xff" * 40):
        path.write_bytes(data)
        with inspection.content_of(str(path), "disk") as opened:
            packed_size.size(opened, "zstd")


@pytest.mark.parametrize("kind", ["lzma", "zstd"])
def test_hostile_length_costs_no_look_for_each_of_its_bytes(kind: str) -> None:
    """Zeros behind a stream of xz, and frames of zstd that say that they are empty and to be skipped."""
    looks = 0
    frame, at_end = b"\x50\x2a\x4d\x18" + bytes(4), bytes(12)

    def at(offset: int, size: int) -> bytes:
        nonlocal looks
        looks += 1
        assert looks <= most + 2
        return at_end[:size] if kind == "lzma" else (frame * 3)[:size]

    most = packed_size.MOST_PADDING // 4 if kind == "lzma" else 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_size, "MOST_BLOCKS", 1000)
        assert packed_size.size(image_headers.Content(at, 1 << 40, whole=True), kind) is None


def test_empty_file_in_zstd_is_refused(store: Store) -> None:
    path = store.uploads / "empty.zst"
    path.write_bytes(packed(["zstd", "-q"], b""))
    for action in ("stat", "cp"):
        store.fails(action, "SS021", "empty", PATH=path, SIZE=8)


def test_gz_is_read_once_for_its_size(store: Store, content: bytes) -> None:
    path = store.uploads / "disk.raw.gz"
    path.write_bytes(gzip.compress(content, 1))
    assert store.ok("stat", PATH=path) == "13"
