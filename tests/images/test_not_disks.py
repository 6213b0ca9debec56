# SPDX-License-Identifier: Apache-2.0
"""What is no disk is refused by its name: archives, exports, pages, foreign formats.

Where a program of this machine makes or reads such a file, it does; file(1) says what the others are.
"""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.intake import not_disks
from tools.test_datastore import Store

MiB = 1 << 20
PROGRAMS = {
    "disk.tar": (["tar", "-cf", "{to}", "-C", "{directory}", "disk"], "a tar archive"),
    "disk.v7.tar": (["tar", "--format=v7", "-cf", "{to}", "-C", "{directory}", "disk"], "a tar archive"),
    "disk.tgz": (["tar", "-czf", "{to}", "-C", "{directory}", "disk"], "a tar archive"),
    "disk.tar.xz": (["tar", "-cJf", "{to}", "-C", "{directory}", "disk"], "a tar archive"),
    "disk.tar.zst": (["tar", "--zstd", "-cf", "{to}", "-C", "{directory}", "disk"], "a tar archive"),
    "disk.zip": (["zip", "-q", "-j", "{to}", "{directory}/disk"], "a zip archive"),
    "disk.raw.lz4": (["lz4", "-q", "{directory}/disk", "{to}"], "lz4 data"),
    "disk.raw.lzma": (["xz", "--format=lzma", "-k", "-c", "{directory}/disk"], "lzma data"),
    "disk.raw.lzo": (["lzop", "-q", "-o", "{to}", "{directory}/disk"], "lzop data"),
    "disk.parallels": (["qemu-img", "create", "-q", "-f", "parallels", "{to}", "16M"], "Parallels"),
    "page.html.gz": (["gzip", "-c", "{directory}/page"], "HTML"),
    "disk.gz.gz": (["gzip", "-c", "{directory}/disk.gz"], "gzip data"),
}
"""Commands that make a file, and the word by which it is refused."""


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.fault(51, "what is no disk is refused by its name, and no VM gets it as one")
def test_archive_of_a_program_is_refused_by_its_name(store: Store, tmp_path: Path, name: str) -> None:
    words, word = PROGRAMS[name]
    (tmp_path / "disk").write_bytes(os.urandom(100_000).ljust(MiB, b"\0"))
    (tmp_path / "page").write_text("<!DOCTYPE html>\n<title>Not found</title>")
    (tmp_path / "disk.gz").write_bytes(gzip.compress((tmp_path / "disk").read_bytes()))
    path = store.uploads / name
    argv = [text.format(to=path, directory=tmp_path) for text in words]
    done = subprocess.run(argv, check=True, capture_output=True)
    if "-c" in words:
        path.write_bytes(done.stdout)
    for action in ("stat", "cp"):
        store.fails(action, "SS076", "no disk but", word, PATH=path, SIZE=64)


def ewf() -> bytes:
    """An EVF section of an EnCase image, as libewf's specification has it."""
    return b"EVF\x09\x0d\x0a\xff\x00" + struct.pack("<BHH", 1, 1, 0) + b"header2".ljust(16, b"\0") + bytes(60)


def parallels() -> bytes:
    return struct.pack("<16sIIIIII", b"WithoutFreeSpace", 2, 16, 64, 63, 1, 2048).ljust(64, b"\0")


def dmg() -> bytes:
    return b"x" * 4096 + struct.pack(">4sII", b"koly", 4, 512).ljust(512, b"\0")


WRITTEN: dict[str, tuple[bytes, str, str]] = {
    # What it is, the word by which it is refused, and what file(1) says of it.
    "snapshot-sesparse.vmdk": (struct.pack("<QQQQ", 0xCAFEBABE, 0x200000001, 2048, 8), "SESparse", ""),
    "harddisk.hds": (parallels(), "Parallels", ""),
    "disk.E01": (ewf(), "EnCase", "EWF"),
    "disk.dmg": (dmg(), "Apple disk image", ""),
    "vzdump-qemu-100.vma": (b"VMA\0" + struct.pack(">I", 1) + bytes(12280), "Proxmox", ""),
    "disk.7z": (b"7z\xbc\xaf\x27\x1c\0\x04" + bytes(24), "7z", "7-zip"),
    "disk.rar": (b"Rar!\x1a\x07\x01\0" + bytes(24), "rar", "RAR"),
    "disk.cab": (b"MSCF\0\0\0\0" + struct.pack("<II", 64, 0) + bytes(48), "cabinet", "Microsoft Cabinet"),
    "install.wim": (b"MSWIM\0\0\0" + struct.pack("<II", 208, 0x10D00) + bytes(192), "WIM", "Windows imaging"),
    "disk.deb": (
        b"!<arch>\ndebian-binary   1410122664  0     0     100644  4         `\n2.0\n",
        "ar archive",
        "Debian",
    ),
    "disk.cpio": (b"070701" + b"0" * 104 + b"disk\0\0", "cpio", "cpio"),
    "system.img": (
        struct.pack("<IHHHHIIII", 0xED26FF3A, 1, 0, 28, 12, 4096, 8, 1, 0),
        "Android",
        "Android sparse",
    ),
    "export-diff": (b"rbd diff v1\n" + bytes(100), "export-diff", ""),
    "export.v2": (b"rbd image v2\n" + bytes(100), "rbd export", ""),
    "saved": (b"LibvirtQemudSave" + bytes(100), "saved memory", "Libvirt QEMU Suspend"),
    "btrfs": (b"btrfs-stream\0" + bytes(100), "btrfs send", "BTRFS stream"),
    "page.qcow2": (b"\n\n  <html><head><title>404</title>", "HTML", "HTML"),
    "page-of-s3.img": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML", "XML"),
    "page-in-utf16.img": (b"\xff\xfe" + "<html><body>x".encode("utf-16-le"), "HTML", ""),
    "error.img": (b'{\n "message": "Bad credentials", "status": 401 }', "JSON", "JSON"),
    "manual.pdf": (b"%PDF-1.7\n", "PDF", "PDF"),
    "SHA256SUMS": (b"0" * 64 + b" *disk.img\n", "checksums", ""),
    "lfs.img": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS", ""),
    "appliance.run": (b"#!/bin/sh\n# This script was generated using Makeself\n", "script", "script"),
    "vmlinux": (b"\x7fELF\2\1\1" + bytes(57), "ELF", "ELF"),
    "disk.png.key": (b"-----BEGIN PGP SIGNATURE-----\n", "PEM", "PGP"),
    "disk.raw.Z": (b"\x1f\x9d\x90" + bytes(50), "compress data", "compress"),
    "disk.raw.lz": (b"LZIP\1\x0c" + bytes(50), "lzip", "lzip"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_another_program_calls_an_image_is_refused_by_its_name(store: Store, name: str) -> None:
    content, word, known = WRITTEN[name]
    path = store.uploads / name
    path.write_bytes(content)
    if known:
        said = subprocess.run(["file", "-b", str(path)], capture_output=True, check=True).stdout.decode()
        assert known.lower() in said.lower(), said
    kind = not_disks.kind(content[: not_disks.HEAD], content[-not_disks.TAIL :])
    assert kind and word in kind.name
    store.fails("cp", "SS076", "no disk but", word, PATH=path, SIZE=64)


def test_stat_refuses_it_as_well(store: Store) -> None:
    for name in ("harddisk.hds", "disk.dmg", "page.qcow2"):
        (store.uploads / name).write_bytes(WRITTEN[name][0])
        store.fails("stat", "SS076", WRITTEN[name][1], PATH=store.uploads / name)


def test_backup_of_proxmox_is_refused_and_its_exports_are_taken(store: Store, raw: Path) -> None:
    """vzdump writes .vma.zst; `qm disk` and the like leave .raw.zst and qcow2."""
    vma = store.uploads / "vzdump-qemu-100.vma.zst"
    subprocess.run(["zstd", "-q", "-o", str(vma)], input=b"VMA\0" + bytes(100_000), check=True)
    for action in ("stat", "cp"):
        store.fails(action, "SS076", "Proxmox", PATH=vma, SIZE=64)
    exported = store.uploads / "vm-100-disk-0.raw.zst"
    subprocess.run(["zstd", "-q", str(raw), "-o", str(exported)], check=True)
    source, format = store.cp(exported, SIZE=store.ok("stat", PATH=exported))
    assert (source.read_bytes(), format) == (raw.read_bytes(), "raw")


def test_file_datastore_takes_anything(store: Store) -> None:
    store.type = 2
    for name in ("page.qcow2", "disk.7z", "appliance.run", "lfs.img"):
        path = store.uploads / name
        path.write_bytes(WRITTEN[name][0])
        store.ok("stat", PATH=path, TYPE=5)
        assert store.cp(path, SIZE=1, TYPE=5)[0].read_bytes() == WRITTEN[name][0]


def test_packed_file_is_kept_where_nothing_is_decompressed(store: Store) -> None:
    store.template["NO_DECOMPRESS"] = "yes"
    for name, content in (("a.gz", gzip.compress(b"x" * 1000)), ("a.lz4", b"\x04\x22\x4d\x18" + bytes(99))):
        path = store.uploads / name
        path.write_bytes(content)
        assert store.ok("stat", PATH=path) == "1"
        assert store.cp(path, SIZE=1)[0].read_bytes() == content
    (store.uploads / "a.zip").write_bytes(b"PK\3\4" + bytes(100))
    store.fails("cp", "SS076", "zip", PATH=store.uploads / "a.zip", SIZE=1)


DISKS: dict[str, list[str]] = {
    "ext4": ["mkfs.ext4", "-q", "-F", "{path}"],
    "XFS": ["mkfs.xfs", "-q", "-f", "{path}"],
    "swap": ["mkswap", "{path}"],
    "LUKS": [
        "cryptsetup",
        "-q",
        "--pbkdf-force-iterations",
        "4",
        "--pbkdf-memory",
        "32",
        "luksFormat",
        "{path}",
        "-",
    ],
    "btrfs": ["mkfs.btrfs", "-q", "{path}"],
    "LVM": ["pvcreate", "-q", "{path}"],
    "FAT": ["mkfs.vfat", "{path}"],
    "squashfs": ["mksquashfs", "/etc/hostname", "{path}", "-noappend", "-quiet"],
}


@pytest.mark.parametrize("name", DISKS)
def test_disk_is_a_disk(tmp_path: Path, name: str) -> None:
    """Partition tables, file systems, encryption: what disks begin with is none of the table's words."""
    words = DISKS[name]
    path = tmp_path / "disk"
    path.write_bytes(bytes(320 * MiB if name == "XFS" else 16 * MiB if name != "btrfs" else 128 * MiB))
    argv = [word.format(path=path) for word in words]
    subprocess.run(argv, input=b"label: dos\nstart=2048\n", capture_output=True, check=name != "LVM")
    with path.open("rb") as file:
        head = file.read(not_disks.HEAD)
    assert not_disks.kind(head) is None, name


@given(st.binary(max_size=600), st.sampled_from(sorted(not_disks.BEGINS)))
def test_any_beginning_is_judged_without_a_crash(head: bytes, magic: bytes) -> None:
    for content in (head, magic + head, b"]\0\0" + head, b"{" + head, b"<" + head):
        not_disks.kind(content, head)


def test_json_text_of_any_length_is_one() -> None:
    for value in ({"a": 1}, [{"a": 1}], [["x"]], {}):
        kind = not_disks.kind(json.dumps(value).encode())
        assert kind and "JSON" in kind.name
