# SPDX-License-Identifier: Apache-2.0
"""Which words of a VM's DISK are read at all: what stands there beside them opens nothing."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Iterator

import pytest

LIB = Path(__file__).resolve().parents[2] / "lib" / "semishared"
READERS = {"text", "number", "is_yes", "value", "first"}
OF_ONED = "oned writes it, for every disk"
OF_IMAGE = "oned writes it for a disk of an image (Image::disk_attribute, Datastore::disk_attribute), and no other disk is asked"
OF_USER = "its user says it, as docs/reference/attributes.md and OpenNebula's own documentation have it"
WORDS = {
    "ATTACH": OF_ONED,
    "DISK_ID": OF_ONED,
    "TARGET": OF_ONED,
    "TM_MAD": OF_ONED,
    "TM_MAD_SYSTEM": OF_ONED,
    "TYPE": OF_ONED,
    "CLONE": OF_IMAGE,
    "DATASTORE_ID": OF_IMAGE,
    "IMAGE": OF_IMAGE,
    "IMAGE_ID": OF_IMAGE,
    "ORIGINAL_SIZE": OF_IMAGE,
    "PERSISTENT": OF_IMAGE,
    "SHAREABLE": OF_IMAGE,
    "SOURCE": OF_IMAGE,
    "DRIVER": OF_USER,
    "FORMAT": OF_USER,
    "FS": OF_USER,
    "LUKS_SECRET": OF_USER,
    "MOUNT_TAG": OF_USER,
    "READONLY": OF_USER,
    "SEMISHARED_ON_HOST_FAILURE": OF_USER,
    "SEMISHARED_SHARE_ACCESS": "it is not believed: what has it, and none of our context, is refused (plan/filesystems.py)",
    "SIZE": OF_USER,
}


def _reads(tree: ast.AST, within_disk: bool = False) -> Iterator[str]:
    """Yield the words that are read from something called disk, or in the view of one."""
    for node in ast.iter_child_nodes(tree):
        yield from _reads(node, within_disk or isinstance(node, ast.ClassDef) and node.name == "Disk")
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READERS and node.args):
            continue
        of, word = node.func.value, node.args[0]
        is_disk = isinstance(of, ast.Name) and (of.id == "disk" or within_disk and of.id == "self")
        if is_disk or isinstance(of, ast.Attribute) and of.attr == "disk":
            yield str(word.value) if isinstance(word, ast.Constant) else ""


@pytest.mark.fault(23, "what DISK alone says is in one list, and nothing else of it is read")
def test_only_these_words_of_a_disk_are_read() -> None:
    found = {word: path for path in sorted(LIB.rglob("*.py")) for word in _reads(ast.parse(path.read_text()))}
    assert {word for word in found if word.isupper()} == set(WORDS)  # libvirt's are small
