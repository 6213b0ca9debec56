# SPDX-License-Identifier: Apache-2.0
"""qemu-img as we call it, and what it says of images that are crafted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from semishared.errors import ToolFailed, UnsafeImage
from semishared.intake import judge
from semishared.store.dir.store import DirDraft
from semishared.tools import layers, qemu_img, run
from tools.world import MiB, allocated, qemu_io


def info(path: Path) -> dict[str, object]:
    answer: dict[str, object] = json.loads(
        subprocess.check_output(["qemu-img", "info", "--output=json", str(path)])
    )
    return answer


@pytest.mark.parametrize("format", ["raw", "qcow2"])
def test_create_makes_a_sparse_image_of_that_size(tmp_path: Path, format: str) -> None:
    qemu_img.create(str(tmp_path / "image"), format, 1 << 40)
    assert qemu_img.virtual_size(str(tmp_path / "image"), format) == 1 << 40
    assert allocated(tmp_path / "image") < MiB


@pytest.mark.parametrize("backing_format", ["raw", "qcow2"])
@pytest.mark.parametrize(("size", "found"), [(0, 64 * MiB), (100 * MiB, 100 * MiB)])
def test_overlay_reads_its_backing_file_and_keeps_writes_to_itself(
    tmp_path: Path, backing_format: str, size: int, found: int
) -> None:
    base, top = tmp_path / "base $(x) 'y'", tmp_path / "top"
    qemu_img.create(str(base), backing_format, 64 * MiB)
    qemu_io(base, backing_format, "write -P 0x11 0 1M")
    before = base.read_bytes()
    qemu_img.create_overlay(str(top), str(base), backing_format, size, "extended_l2=on,cluster_size=128k")
    qemu_io(top, "qcow2", "write -P 0x22 64k 4k")
    qemu_io(top, "qcow2", "read -P 0x11 0 64k")
    qemu_io(top, "qcow2", "read -P 0x22 64k 4k")
    qemu_io(top, "qcow2", "read -P 0x11 68k 956k")
    assert base.read_bytes() == before
    assert qemu_img.virtual_size(str(top), "qcow2") == found
    said = info(top)
    assert (said["backing-filename"], said["backing-filename-format"]) == (str(base), backing_format)


def test_raw_image_that_looks_like_qcow2_is_raw_when_we_say_so(tmp_path: Path) -> None:
    qemu_img.create(str(tmp_path / "inner"), "qcow2", 512 * MiB)
    size = os.path.getsize(tmp_path / "inner")
    assert qemu_img.virtual_size(str(tmp_path / "inner"), "raw") == -(-size // 512) * 512
    assert qemu_img.virtual_size(str(tmp_path / "inner"), "qcow2") == 512 * MiB


@pytest.mark.parametrize(
    ("source", "target"),
    [("raw", "qcow2"), ("qcow2", "raw"), ("vmdk", "raw"), ("vdi", "qcow2"), ("vpc", "raw"), ("vhdx", "raw")],
)
def test_convert_keeps_the_data_and_holes(tmp_path: Path, source: str, target: str) -> None:
    subprocess.run(["qemu-img", "create", "-q", "-f", source, str(tmp_path / "in"), "64M"], check=True)
    qemu_io(tmp_path / "in", source, "write -P 0x33 10M 64k")
    assert judge.file(str(tmp_path / "in"), judge.DISK, 1 << 40, "in", packed=False).format == source
    qemu_img.convert(str(tmp_path / "in"), source, str(tmp_path / "out"), target)
    qemu_io(tmp_path / "out", target, "read -P 0x33 10M 64k")
    qemu_io(tmp_path / "out", target, "read -P 0 0 10M")
    assert allocated(tmp_path / "out") < 2 * MiB


def test_convert_flattens_a_chain(tmp_path: Path) -> None:
    for number, backing in ((1, ""), (2, "1"), (3, "2")):
        if backing:
            qemu_img.create_overlay(str(tmp_path / f"{number}"), str(tmp_path / backing), "qcow2", 0, "")
        else:
            qemu_img.create(str(tmp_path / "1"), "qcow2", 8 * MiB)
        qemu_io(tmp_path / f"{number}", "qcow2", f"write -P {number} {number}M 64k")
    qemu_img.convert(str(tmp_path / "3"), "qcow2", str(tmp_path / "flat"), "qcow2")
    assert "backing-filename" not in info(tmp_path / "flat")
    for number in (1, 2, 3):
        qemu_io(tmp_path / "flat", "qcow2", f"read -P {number} {number}M 64k")


def test_resize_grows(tmp_path: Path) -> None:
    for format in ("raw", "qcow2"):
        qemu_img.create(str(tmp_path / format), format, MiB)
        qemu_img.resize(str(tmp_path / format), format, 3 * MiB)
        assert qemu_img.virtual_size(str(tmp_path / format), format) == 3 * MiB


@pytest.mark.parametrize(("size", "made"), [(0, 3), (2, 3), (3, 3), (4, 4)])
def test_a_draft_is_at_least_as_large_as_it_is_to_be_and_not_cut_off(
    tmp_path: Path, size: int, made: int
) -> None:
    qemu_img.create(str(tmp_path / "source"), "raw", 3 * MiB)
    DirDraft(str(tmp_path / "made"), "qcow2", size * MiB).fill(str(tmp_path / "source"), "raw")
    assert qemu_img.virtual_size(str(tmp_path / "made"), "qcow2") == made * MiB


def test_garbage_is_a_failed_tool(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"QFI\xfb" + b"\xff" * 500)
    with pytest.raises(ToolFailed, match="qemu-img info"):
        qemu_img.virtual_size(str(tmp_path / "x"), "qcow2")


def dangerous(directory: Path, kind: str) -> Path:
    """Make an image, with the real tool, that leads to `secret`."""
    secret, path = directory / "secret", directory / "image"
    for format, name in (("raw", "secret"), ("vmdk", "secret.vmdk")):
        subprocess.run(["qemu-img", "create", "-q", "-f", format, str(directory / name), "1M"], check=True)
    argv = {
        "qcow2 v2": ["-f", "qcow2", "-o", "compat=0.10", "-F", "raw", "-b", str(secret)],
        "qcow2 v3": ["-f", "qcow2", "-F", "raw", "-b", str(secret)],
        "qcow2 json": [
            "-f",
            "qcow2",
            "-u",
            "-F",
            "raw",
            "-b",
            'json:{"driver":"raw","file":{"driver":"file","filename":"/etc/shadow"}}',
        ],
        "qcow2 data file": ["-f", "qcow2", "-o", f"data_file={secret},data_file_raw=on"],
        "vmdk with a parent": ["-f", "vmdk", "-F", "vmdk", "-b", str(directory / "secret.vmdk")],
        "vmdk flat": ["-f", "vmdk", "-o", "subformat=monolithicFlat"],
        "vmdk split": ["-f", "vmdk", "-o", "subformat=twoGbMaxExtentSparse"],
        "qed": ["-f", "qed", "-F", "raw", "-b", str(secret)],
    }[kind]
    subprocess.run(["qemu-img", "create", "-q", *argv, str(path), "1M"], check=True)
    return path


KINDS = [
    "qcow2 v2",
    "qcow2 v3",
    "qcow2 json",
    "qcow2 data file",
    "vmdk with a parent",
    "vmdk flat",
    "vmdk split",
    "qed",
]


@pytest.mark.parametrize("kind", KINDS)
def test_image_made_by_the_real_tool_that_leads_elsewhere_is_unsafe(tmp_path: Path, kind: str) -> None:
    path = dangerous(tmp_path, kind)
    with pytest.raises(UnsafeImage):
        judge.file(str(path), judge.DISK, 1 << 40, "image", packed=False)


def test_huge_virtual_size_is_unsafe(tmp_path: Path) -> None:
    qemu_img.create(str(tmp_path / "image"), "qcow2", 1 << 50)
    with pytest.raises(UnsafeImage, match="claims a size of 1024.0 TiB"):
        judge.file(str(tmp_path / "image"), judge.DISK, 64 << 40, "image", packed=False)


@pytest.mark.parametrize("backing", ["", "base"])
def test_rebased_copy_takes_over_what_lay_between(tmp_path: Path, backing: str) -> None:
    """base <- middle <- top: without `middle` the copy of `top` reads as before, and `top`, which a guest may
    have open, is as it was.
    """
    base, middle, top, new = (tmp_path / name for name in ("base", "middle", "top", "new"))
    qemu_img.create(str(base), "raw", 8 * MiB)
    qemu_io(base, "raw", "write -P 0x11 0 3M")
    qemu_img.create_overlay(str(middle), "base", "raw", 0, "")
    for command in ("write -P 0x22 1M 1M", "write -z 2560k 64k"):
        qemu_io(middle, "qcow2", command)
    qemu_img.create_overlay(str(top), "middle", "qcow2", 12 * MiB, "")
    qemu_io(top, "qcow2", "write -P 0x33 2M 64k")
    before = top.read_bytes()
    qemu_img.rebased(str(top), str(new), backing, "raw" if backing else "")
    assert top.read_bytes() == before
    middle.unlink()
    if not backing:
        base.unlink()
    held = (
        "0x11 0 1M",
        "0x22 1M 1M",
        "0x33 2M 64k",
        "0x11 2112k 448k",
        "0 2560k 64k",
        "0x11 2624k 448k",
        "0 3M 9M",
    )
    for part in held:
        qemu_io(new, "qcow2", f"read -P {part}")
    assert info(new).get("backing-filename", "") == backing


def test_layer_is_put_over_another_without_a_change_of_its_data(tmp_path: Path) -> None:
    base, middle, top = (tmp_path / name for name in ("base", "middle", "top"))
    qemu_img.create(str(base), "raw", 8 * MiB)
    qemu_img.create_overlay(str(middle), "base", "raw", 0, "")
    qemu_io(middle, "qcow2", "write -P 0x22 1M 1M")
    qemu_img.create_overlay(str(top), "base", "raw", 0, "")
    qemu_img.lay_over(str(top), "middle", "qcow2")
    qemu_io(top, "qcow2", "read -P 0x22 1M 1M")


def test_limit_of_a_foreign_image_is_for_its_tables_and_not_for_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion whose every write waits for another thread fits into a quarter of what is allowed."""
    raw, packed = tmp_path / "raw", tmp_path / "image.vmdk"
    raw.write_bytes(os.urandom(96 * MiB))
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "vmdk", str(raw), str(packed)], check=True)
    *limits, space = qemu_img.FOREIGN
    assert space == f"--as={1 << 30}"
    monkeypatch.setattr(qemu_img, "FOREIGN", [*limits, f"--as={1 << 28}"])
    qemu_img.convert(str(packed), "vmdk", str(tmp_path / "converted"), "raw", foreign=True)
    assert (tmp_path / "converted").read_bytes() == raw.read_bytes()


@pytest.mark.fault(
    50,
    "a map of another QEMU that lacks what a commit goes by is refused in one line, and not taken "
    "for an empty one",
)
@pytest.mark.parametrize(
    "told",
    ["", "{}", "null", "[3]", '[{"start": 0, "length": 9, "depth": 0, "zero": true}]', '[{"depth": 0}]'],
)
def test_a_map_that_is_not_understood_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    (tmp_path / "qemu-img").write_text(f"#!/bin/sh\necho '{told}'\n")
    (tmp_path / "qemu-img").chmod(0o755)
    monkeypatch.setattr(
        run, "environment", lambda keep=(): {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    )
    with pytest.raises(ToolFailed, match="not understood"):
        qemu_img.mapped("json:{}")


def test_the_size_that_a_header_says_is_qemus(tmp_path: Path) -> None:
    for format, size in (("qcow2", 3 << 40), ("raw", 5 << 20)):
        path = tmp_path / format
        qemu_img.create(str(path), format, size)
        assert layers.virtual_size(str(path)) == size == qemu_img.virtual_size(str(path), format)
    whole = (tmp_path / "qcow2").read_bytes()
    path = tmp_path / "odd"
    for text, size in ((whole[:20], 0), (whole[:24] + b"\xff" * 8, 0), (b"", 0)):
        path.write_bytes(text)
        assert layers.virtual_size(str(path)) == size
    path.unlink()
    assert layers.virtual_size(str(path)) == 0
    os.mkfifo(path)
    assert layers.virtual_size(str(path)) == 0, "nothing is waited for"
    assert layers.virtual_size(str(tmp_path)) == 0
