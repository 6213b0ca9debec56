# SPDX-License-Identifier: Apache-2.0
"""Headers of uploaded images, made by hand: what a tool might follow is seen before any tool runs."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from semishared.errors import EncryptedDisk, MissingImage, NotSupported, UnsafeImage, WrongFormat
from semishared.intake import judge
from semishared.intake.unpack import MAGIC, Spoiled, decompressor, unpacked
from semishared.tools import image_headers, inspection

GiB = 1 << 30


def qcow2(
    version: int = 3, backing: int = 0, size: int = GiB, incompatible: int = 0, cipher: int = 0
) -> bytes:
    head = b"QFI\xfb" + struct.pack(
        ">IQIIQIIQQIIQ", version, backing, 20 if backing else 0, 16, size, cipher, 1, 196608, 65536, 1, 0, 0
    )
    return (head + struct.pack(">QQQII", incompatible, 0, 0, 4, 104)).ljust(512, b"\0")


def vmdk(
    capacity: int = 2048, descriptor: bytes = b"# Disk DescriptorFile\nversion=1\nparentCID=ffffffff\n"
) -> bytes:
    head = b"KDMV" + struct.pack("<IIQQQQIQQQ", 1, 3, capacity, 128, 1, 20, 512, 21, 26, 128)
    return head.ljust(512, b"\0") + descriptor.ljust(20 * 512, b"\0")


VMDK_TEXT = (
    b'# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType="monolithicFlat"\nRW '
    b'2048 FLAT "/etc/shadow" 0\n'
)
VDI = (b"<<< Oracle VM VirtualBox Disk Image >>>\n".ljust(64, b"\0") + b"\x7f\x10\xda\xbe").ljust(368, b"\0")
VDI += struct.pack("<Q", 3 * GiB) + bytes(136)
VPC = b"conectix".ljust(48, b"\0") + struct.pack(">QHBB", 2 * GiB, 4000, 16, 63) + bytes(452)
DANGEROUS = {
    "qcow2 v2 with a backing file": (qcow2(2, backing=400), "backing file"),
    "qcow2 v3 with a backing file": (qcow2(3, backing=400), "backing file"),
    "qcow2 with a backing name beyond 4 GiB": (qcow2(3, backing=1 << 40), "backing file"),
    "qcow2 with a data file": (qcow2(3, incompatible=4), "data file"),
    "qcow2 with a data file among other bits": (qcow2(3, incompatible=0b10101), "data file"),
    "qcow1": (qcow2(1), "version 1"),
    "qcow2 of a future version": (qcow2(4), "version 4"),
    "vmdk descriptor": (VMDK_TEXT, "extents"),
    "vmdk descriptor in odd letters behind blanks": (
        b"\n  \t" + VMDK_TEXT.replace(b"# Disk", b"# DISK"),
        "extents",
    ),
    "sparse vmdk with capacity 0": (vmdk(0), "extents"),
    "sparse vmdk with a parent": (
        vmdk(descriptor=b'# Disk DescriptorFile\nparentCID=1\nparentFileNameHint="/etc/shadow"\n'),
        "parent",
    ),
    "old vmdk": (b"COWD" + bytes(508), "extents"),
    "qed": (b"QED\0" + bytes(508), "qed"),
    "json name": (b'json:{"driver":"raw","file.filename":"/etc/shadow"}', "json"),
}


@pytest.mark.parametrize(("content", "word"), DANGEROUS.values(), ids=DANGEROUS)
def test_image_that_names_other_files_is_refused_before_a_tool_opens_it(
    tmp_path: Path, content: bytes, word: str
) -> None:
    path = tmp_path / "image"
    path.write_bytes(content)
    with pytest.raises(UnsafeImage, match="my-upload.*" + word):
        judge.file(str(path), judge.DISK, 1 << 60, "my-upload", packed=False)


@pytest.mark.parametrize(
    ("head", "tail", "format"),
    [
        (qcow2(2), b"", "qcow2"),
        (qcow2(3), b"", "qcow2"),
        (vmdk(), b"", "vmdk"),
        (VMDK_TEXT, b"", "vmdk"),
        (VDI, b"", "vdi"),
        (b"vhdxfile" + bytes(504), b"", "vhdx"),
        (b"conectix" + bytes(504), b"", "vpc"),
        (bytes(512), b"conectix" + bytes(504), "vpc"),
        (bytes(512), bytes(512), "raw"),
        (b"", b"", "raw"),
        (b"QFI", b"", "raw"),
        (b"#!/bin/sh\n", b"", "raw"),
        (b"\xeb\x63\x90", b"", "raw"),
    ],
)
def test_format_is_what_the_header_announces(head: bytes, tail: bytes, format: str) -> None:
    assert inspection.detect(head, tail) == format


@pytest.mark.parametrize("content", [qcow2(2), qcow2(3), qcow2(3, incompatible=0b10011), vmdk()])
def test_image_on_its_own_is_safe(content: bytes) -> None:
    assert inspection.names_other_files(content, inspection.detect(content)) == ""


@given(st.binary(max_size=600))
@example(b"QFI\xfb")
@example(b"KDMV")
@example(b"QFI\xfb\0\0\0\3" + bytes(30))
@example(b"vhdxfile")
def test_any_header_is_judged_without_a_crash(head: bytes) -> None:
    tables = b"vhdxfile".ljust(192 << 10, b"\0") + (b"regi" + head).ljust(128 << 10, b"\0")
    for content in (head, b"QFI\xfb" + head, b"KDMV" + head, tables):
        format = inspection.detect(content)
        inspection.names_other_files(content, format)
        size = image_headers.facts(image_headers.beginning(content, None), format).size
        assert size is None or size >= 0
        assert image_headers.needed(content) >= image_headers.HEAD


def test_raw_image_is_as_big_as_its_file(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"x" * 1000)
    assert judge.file(str(path), judge.DISK, 1000, "my-upload", packed=False) == judge.Judged("raw", 1000, 0)
    with pytest.raises(UnsafeImage, match="my-upload claims a size of 1000 B"):
        judge.file(str(path), judge.DISK, 999, "my-upload", packed=False)


def test_what_is_no_file_is_a_missing_image(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(MissingImage, match="my-upload"):
            judge.file(str(path), judge.DISK, GiB, "my-upload", packed=False)


@pytest.mark.parametrize(
    ("head", "size"),
    [
        (qcow2(size=5 * GiB), 5 * GiB),
        (vmdk(2048), 1 << 20),
        (bytes(512), None),
        (VDI, 3 * GiB),
        (VPC, 2 * GiB),
    ],
)
def test_size_in_header(head: bytes, size: object) -> None:
    assert judge.beginning(head, None, judge.DISK, 1 << 60, "my-upload") == size


def test_vhdx_whose_size_stands_too_far_behind_is_not_fetched_for_it() -> None:
    """Its beginning says where the metadata are; a hostile one says anything."""
    assert judge.needed(b"vhdxfile" + bytes(504), "my-upload") == 320 << 10
    for place in (judge.FARTHEST, 1 << 62):
        table = struct.pack("<4sIII", b"regi", 0, 1, 0) + image_headers.METADATA
        table += struct.pack("<QII", place, 1 << 20, 1)
        head = (b"vhdxfile".ljust(192 << 10, b"\0") + table).ljust(320 << 10, b"\0")
        with pytest.raises(NotSupported, match="upload it unpacked from a file: my-upload"):
            judge.needed(head, "my-upload")


def test_qcow2_that_is_encrypted_inside_is_not_opened_on_a_host_either() -> None:
    with pytest.raises(EncryptedDisk, match="LUKS.*image"):
        inspection.check_header(qcow2(cipher=2), "qcow2", "image")
    inspection.check_header(qcow2(), "qcow2", "image")


@pytest.mark.parametrize("name", DANGEROUS)
def test_header_is_looked_at_again_but_not_that_of_a_raw_image(name: str) -> None:
    content, word = DANGEROUS[name]
    inspection.check_header(content, "raw", "image")
    with pytest.raises((UnsafeImage, WrongFormat)) as caught:
        inspection.check_header(content, "qcow2", "image")
    assert word in caught.value.detail or caught.value.id == "SS075"


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\x1f\x8b\x08", "gzip"),
        (b"BZh9", "bz2"),
        (b"\xfd7zXZ\0", "lzma"),
        (b"QFI\xfb", ""),
        (b"", ""),
        (b"PK\3\4", ""),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\x50\x2a\x4d\x18\4\0", "zstd"),
    ],
)
def test_compression_is_recognised(head: bytes, kind: str) -> None:
    assert decompressor(head) == kind


@pytest.mark.parametrize("content", [b"", b"no archive"])
@pytest.mark.parametrize("kind", sorted(set(MAGIC) - {"zstd"}))  # a program: tests/images
def test_what_does_not_begin_as_it_is_said_to_is_spoiled_and_not_empty(kind: str, content: bytes) -> None:
    with pytest.raises(Spoiled):
        list(unpacked(io.BytesIO(content), kind))
