# SPDX-License-Identifier: Apache-2.0
"""Images of VirtualBox, VMware, Microsoft and QEMU: whole, cut off, children of others, damaged, encrypted.

They are written by script (made.py), and qemu-img has to find the very disk in them before they are uploaded.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Callable

import pytest

from images import made
from semishared.errors import DamagedImage
from semishared.intake import judge
from tools.test_datastore import Store
from tools.world import qemu_io

MiB = 1 << 20

Maker = Callable[[bytes], bytes]
FORMATS: dict[str, tuple[str, Maker]] = {
    "fixed.vhd of Hyper-V": ("vpc", made.vhd_fixed),
    "fixed.vhd of VirtualBox": ("vpc", lambda disk: made.vhd_fixed(disk, b"vbox")),
    "fixed.vhd of Virtual PC": ("vpc", lambda disk: made.vhd_fixed(disk, b"vpc ")),
    "dynamic.vhd of Hyper-V": ("vpc", made.vhd),
    "dynamic.vhd of VirtualBox": ("vpc", lambda disk: made.vhd(disk, b"vbox")),
    "dynamic.vhd of Virtual PC": ("vpc", lambda disk: made.vhd(disk, b"vpc ")),
    "dynamic.vhd of Disk2vhd": ("vpc", lambda disk: made.vhd(disk, b"d2v ")),
    "dynamic.vhd of XenServer": ("vpc", lambda disk: made.vhd(disk, b"tap\0")),
    "dynamic.vdi": ("vdi", made.vdi),
    "static.vdi": ("vdi", lambda disk: made.vdi(disk, static=True)),
    "monolithicSparse.vmdk": ("vmdk", made.vmdk),
    "streamOptimized.vmdk": ("vmdk", made.vmdk_stream),
    "dynamic.vhdx": ("vhdx", made.vhdx),
}
GEOMETRY = ("VirtualBox", "Virtual PC")
"""Whose VHDs QEMU takes for as long as their geometry, unless it is told otherwise."""


def file_name(name: str) -> str:
    return name.partition(" of ")[0]


def assert_same(raw: Path, path: Path, format: str) -> None:
    """Compare with what qemu-img reads, byte by byte."""
    back = raw.with_name("back")
    name = ["-f", format, str(path)]
    if format == "vpc":
        file = f'"file":{{"driver":"file","filename":"{path}"}}'
        name = [f'json:{{"driver":"vpc","force_size_calc":"current_size",{file}}}']
    subprocess.run(["qemu-img", "convert", *name[:-1], "-O", "raw", name[-1], str(back)], check=True)
    assert back.read_bytes() == raw.read_bytes()


def arrives(store: Store, path: Path | str, raw: Path) -> None:
    """Upload as oned does: with the SIZE that stat has told; all of the disk has to be there."""
    size = store.ok("stat", PATH=path)
    assert int(size) == -(-raw.stat().st_size // MiB)
    source, format = store.cp(path, SIZE=size)
    assert_same(raw, source, format)


@pytest.mark.fault(51, "an image of another program arrives to its last byte")
@pytest.mark.parametrize("name", FORMATS)
def test_whole_image_arrives_to_its_last_byte(store: Store, raw: Path, name: str) -> None:
    format, make = FORMATS[name]
    path = store.uploads / file_name(name)
    path.write_bytes(make(raw.read_bytes()))
    assert_same(raw, path, format)
    if any(creator in name for creator in GEOMETRY):
        told = subprocess.run(["qemu-img", "info", "-f", "vpc", str(path)], capture_output=True, check=True)
        assert f"({raw.stat().st_size} bytes)".encode() not in told.stdout, "QEMU does not go by the geometry"
    arrives(store, path, raw)


@pytest.mark.fault(51, "an image that is cut off is refused, in whatever format")
@pytest.mark.parametrize("name", [name for name in FORMATS if "Virtual" not in name])
def test_image_that_is_cut_off_is_refused(store: Store, content: bytes, name: str) -> None:
    whole = FORMATS[name][1](content)
    path = store.uploads / file_name(name)
    path.write_bytes(whole[: len(whole) * 6 // 10])
    store.fails("stat", "SS077", "cut off", PATH=path)
    store.fails("cp", "SS077", "cut off", PATH=path, SIZE=13)


@pytest.mark.parametrize("name", [name for name in FORMATS if "Virtual" not in name])
def test_image_is_whole_or_refused_wherever_it_is_cut(tmp_path: Path, raw: Path, name: str) -> None:
    """From its last byte to its first: what is taken has the same disk as the whole file."""
    format, make = FORMATS[name]
    path = tmp_path / file_name(name)
    whole = make(raw.read_bytes())
    path.write_bytes(whole)
    judge.file(str(path), judge.DISK, 1 << 40, path.name, False)
    cuts = {0.999, 0.99, 0.97, 0.9, 0.75, 0.5, 0.25, 0.1}
    for length in sorted({len(whole) - 1, *(int(len(whole) * cut) for cut in cuts)}, reverse=True):
        os.truncate(path, length)
        try:
            judge.file(str(path), judge.DISK, 1 << 40, path.name, False)
        except DamagedImage:
            continue
        if length == len(whole) - 1 and format == "vpc":
            continue  # a footer of 511 bytes, as Virtual PC wrote it
        assert_same(raw, path, format)


@pytest.mark.parametrize(
    ("name", "content_of", "word"),
    [
        ("child.avhd", lambda disk: made.vhd(disk, parent="parent.vhd"), "a parent image"),
        ("child.vhd", lambda disk: made.vhd(disk, b"vbox", parent="parent.vhd"), "a parent image"),
        ("child.vdi", lambda disk: made.vdi(disk, parent=True), "a parent image"),
        ("child.avhdx", lambda disk: made.vhdx(disk, parent=True), "a parent image"),
        ("child.vmdk", lambda disk: made.vmdk(disk, parent="parent.vmdk"), "a parent image"),
        (
            "flat.vmdk",
            lambda disk: made.descriptor("vmfs", f'RW {len(disk) // 512} VMFS "disk-flat.vmdk"'),
            "extents in other files",
        ),
        (
            "split.vmdk",
            lambda disk: made.descriptor("twoGbMaxExtentSparse", 'RW 4192256 SPARSE "disk-s001.vmdk"'),
            "extents in other files",
        ),
    ],
)
@pytest.mark.fault(51, "a child without its parent is no disk, in whatever format")
def test_image_that_needs_another_file_is_refused(
    store: Store, content: bytes, name: str, content_of: Maker, word: str
) -> None:
    path = store.uploads / name
    path.write_bytes(content_of(content))
    store.fails("stat", "SS021", word, PATH=path)
    store.fails("cp", "SS021", word, PATH=path, SIZE=13)


def test_vhdx_that_was_not_closed_is_refused(store: Store, content: bytes) -> None:
    path = store.uploads / "open.vhdx"
    path.write_bytes(made.vhdx(content, log=True))
    for action in ("stat", "cp"):
        store.fails(action, "SS077", "not closed", PATH=path, SIZE=13)


# -- qcow2, as QEMU writes it


@pytest.mark.parametrize(
    "options",
    ["", "compat=0.10", "cluster_size=512", "cluster_size=2M", "extended_l2=on,cluster_size=128k", "-c"],
)
@pytest.mark.fault(51, "a qcow2 that is cut off is refused by its own tables")
def test_qcow2_that_is_cut_off_is_refused(store: Store, raw: Path, options: str) -> None:
    path = store.uploads / "disk.qcow2"
    words = ["-c"] if options == "-c" else ["-o", options] if options else []
    subprocess.run(
        ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", *words, str(raw), str(path)], check=True
    )
    arrives(store, path, raw)
    os.truncate(path, path.stat().st_size * 6 // 10)
    assert subprocess.run(["qemu-img", "check", "-q", "-f", "qcow2", str(path)], check=False).returncode == 2
    store.fails("stat", "SS077", "cut off", PATH=path)
    store.template["DRIVER"] = "raw"
    store.fails("cp", "SS077", "cut off", PATH=path, SIZE=13)


@pytest.mark.parametrize("how", ["off", "metadata", "falloc"])
def test_preallocated_qcow2_is_whole(store: Store, how: str) -> None:
    path = store.uploads / "disk.qcow2"
    words = ["-o", f"preallocation={how}", str(path), "16M"]
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *words], check=True)
    assert store.ok("stat", PATH=path) == "16"
    store.cp(path, SIZE=16)


@pytest.mark.parametrize("cipher", ["luks", "aes"])
@pytest.mark.fault(51, "a qcow2 that is encrypted inside, from which no VM starts, is refused")
def test_encrypted_qcow2_is_refused(store: Store, cipher: str) -> None:
    path = store.uploads / "disk.qcow2"
    words = ["--object", "secret,id=k,data=abcd", "-o", f"encrypt.format={cipher},encrypt.key-secret=k"]
    argv = ["qemu-img", "create", "-q", "-f", "qcow2", *words, str(path), "8M"]
    # On a busy machine qemu-img cannot always measure how many rounds LUKS is to have.
    assert any(subprocess.run(argv, check=False, capture_output=True).returncode == 0 for _ in range(5))
    for action in ("stat", "cp"):
        store.fails(action, "SS074", "encrypted inside", cipher.upper(), PATH=path, SIZE=8)


@pytest.mark.parametrize(("bit", "taken"), [(0, True), (1, False)], ids=["dirty", "corrupt"])
@pytest.mark.fault(51, "a qcow2 that QEMU has marked as corrupt is refused; one that is dirty is not")
def test_marked_qcow2(store: Store, bit: int, taken: bool) -> None:
    path = store.uploads / "disk.qcow2"
    options = ["-o", "lazy_refcounts=on", str(path), "8M"]
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *options], check=True)
    with path.open("r+b") as file:
        file.seek(79)
        file.write(bytes([1 << bit]))
    info = subprocess.run(["qemu-img", "info", "-f", "qcow2", str(path)], capture_output=True, check=True)
    assert b"corrupt: true" in info.stdout or taken
    if taken:
        store.cp(path, SIZE=store.ok("stat", PATH=path))
        return
    for action in ("stat", "cp"):
        store.fails(action, "SS077", "corrupt", PATH=path, SIZE=8)


def test_internal_snapshots_are_said(store: Store) -> None:
    path = store.image(format="qcow2", size=8 * MiB)
    subprocess.run(["qemu-img", "snapshot", "-c", "one", str(path)], check=True)
    done = store.run("cp", PATH=path, SIZE=8)
    assert done.returncode == 0
    assert "WARN: cp: image 7: " in done.stderr.decode() and "1 internal snapshots" in done.stderr.decode()


# -- raw: CDs and partition tables


def iso(directory: Path, path: Path, size: int) -> None:
    (directory / "content").mkdir()
    (directory / "content/file").write_bytes(os.urandom(size))
    subprocess.run(
        ["genisoimage", "-quiet", "-R", "-V", "CD", "-o", str(path), str(directory / "content")], check=True
    )


@pytest.mark.fault(51, "a CD that is shorter than its volume is refused")
def test_cd_that_is_cut_off_is_refused(store: Store, tmp_path: Path) -> None:
    path = store.uploads / "cd.iso"
    iso(tmp_path, path, 3 * MiB)
    told = subprocess.run(["isoinfo", "-d", "-i", str(path)], capture_output=True, check=True).stdout
    assert f"Volume size is: {path.stat().st_size // 2048}".encode() in told
    store.cp(path, SIZE=store.ok("stat", PATH=path, TYPE=1), TYPE=1)
    # Without its padding, as programs read it back from a disc.
    os.truncate(path, path.stat().st_size - 150 * 2048)
    store.cp(path, SIZE=store.ok("stat", PATH=path, TYPE=1), TYPE=1)
    os.truncate(path, path.stat().st_size * 6 // 10)
    for kind in (0, 1):
        for action in ("stat", "cp"):
            store.fails(action, "SS077", "cut off", PATH=path, SIZE=8, TYPE=kind)


def test_page_is_no_cd(store: Store) -> None:
    path = store.uploads / "cd.iso"
    path.write_text("<html><title>Sign in</title></html>")
    for action in ("stat", "cp"):
        store.fails(action, "SS076", "HTML", PATH=path, SIZE=8, TYPE=1)


def test_raw_disk_that_ends_before_its_partitions_is_refused(store: Store) -> None:
    path = store.uploads / "disk.raw"
    path.write_bytes(made.gpt(12 * MiB))
    told = subprocess.run(["blkid", "-p", "-o", "export", str(path)], capture_output=True, check=True)
    assert b"PTTYPE=gpt" in told.stdout, "blkid compares the checksums"
    store.cp(path, SIZE=store.ok("stat", PATH=path))
    os.truncate(path, 7 * MiB)
    for action in ("stat", "cp"):
        store.fails(action, "SS077", "GPT", PATH=path, SIZE=12)


def test_fixed_vhd_is_judged_behind_packing_too(store: Store, content: bytes) -> None:
    path = store.uploads / "disk.vhd.gz"
    whole = made.vhd_fixed(content)
    path.write_bytes(
        subprocess.run(["gzip", "-1"], input=whole[: 7 * MiB], capture_output=True, check=True).stdout
    )
    store.fails("cp", "SS077", "VHD", PATH=path, SIZE=13)


def test_appliance_is_refused_and_its_disk_is_taken(store: Store, raw: Path) -> None:
    """An OVA is a tar archive with an OVF and streamOptimized VMDKs."""
    disk, ova = made.vmdk_stream(raw.read_bytes()), store.uploads / "appliance.ova"
    with tarfile.open(ova, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in (("a.ovf", b"<?xml version='1.0'?><Envelope/>"), ("a-disk1.vmdk", disk)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    for action in ("stat", "cp"):
        store.fails(action, "SS076", "OVA", "tar", PATH=ova, SIZE=13)
    subprocess.run(["tar", "-xf", str(ova), "-C", str(store.uploads)], check=True)
    arrives(store, store.uploads / "a-disk1.vmdk", raw)


def test_data_at_the_end_of_a_vhd_is_there_for_the_guest(store: Store, content: bytes) -> None:
    path = store.uploads / "disk.vhd"
    path.write_bytes(made.vhd(content[:-512] + b"\x77" * 512, b"vbox"))
    source, format = store.cp(path, SIZE=13)
    qemu_io(source, format, f"read -P 0x77 {len(content) - 512} 512")
