# SPDX-License-Identifier: Apache-2.0
"""Which words of a VM's DISK are read at all: what stands there beside them opens nothing."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Iterator, Set

import pytest

from semishared.model import attributes
from unit.sources import nodes, parsed

LIB = Path(__file__).resolve().parents[2] / "lib" / "semishared"
READERS = {"text", "number", "is_yes", "value", "first"}
PROPERTIES = {"Text", "Number"}
OF_ONED = "oned writes it, for every disk"
OF_IMAGE = (
    "oned writes it for a disk of an image (Image::disk_attribute, Datastore::disk_attribute), and no "
    "other disk is asked"
)
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
    "SEMISHARED_SHARE_ACCESS": "it is not believed: what has it, and none of our context, is refused "
    "(plan/libvirt/filesystems.py)",
    "SIZE": OF_USER,
    "SPARSE": OF_USER,
}


PLACES = {
    "opennebula/xml.py": "the view of it",
    "plan/libvirt/domain.py": "what is attached, as its record says",
    "plan/care/vm_vector.py": "text for people: nothing follows from it",
    "plan/vm/checkpoint.py": "what oned has sent for this resume, whose disks a checkpoint is compared with",
    "plan/libvirt/filesystems.py": "directories for guests, in the same",
    "cli/commit.py": "a word of the command line",
}
"""Where an element DISK can be had at all; all else has views of it, from Vm."""


def _is_of_vm(node: ast.AST) -> bool:
    """Tell whether something yields disks of a VM, or is one: `vm.disks`, `vm.disk(3)`,
    `root.find("TEMPLATE", "DISK")`.
    """
    if isinstance(node, ast.Attribute) and node.attr == "disks":
        return isinstance(node.value, (ast.Name, ast.Attribute)) and ast.unparse(node.value).split(".")[
            -1
        ] in ("vm", "self", "known")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == "disk" or any(
            isinstance(word, ast.Constant) and word.value == "DISK" for word in node.args
        )
    return (
        isinstance(node, ast.Call) and bool(node.args) and _is_of_vm(node.args[0])
    )  # next(...), sorted(...), Disk(...)


def _names(tree: ast.AST) -> Set[str]:
    """Return what disks are called in a module: what goes through those of a VM, is one, or is declared as
    one.
    """
    found = {"disk"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.comprehension)) and _is_of_vm(node.iter):
            found.add(ast.unparse(node.target))
        elif isinstance(node, (ast.GeneratorExp, ast.ListComp)) and any(
            _is_of_vm(part.iter) for part in node.generators
        ):
            found.add(ast.unparse(node.elt))
        elif isinstance(node, ast.Assign) and (_is_of_vm(node.value) or _goes_through(node.value)):
            found |= {ast.unparse(target) for target in node.targets}
        elif (
            isinstance(node, ast.arg)
            and node.annotation is not None
            and "Disk" in re.findall(r"\w+", ast.unparse(node.annotation))
        ):
            found.add(node.arg)
    return {name for name in found if name.isidentifier()}


def _goes_through(node: ast.AST) -> bool:
    """Tell whether something is one of what goes through disks of a VM: next(one for one in vm.disks ...)."""
    parts = (
        node.args[0].generators
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.GeneratorExp)
        else []
    )
    return any(_is_of_vm(part.iter) for part in parts)


def _reads(tree: ast.AST, names: Set[str], within_disk: bool = False) -> Iterator[str]:
    """Yield the words that are read from a disk of a VM, or in the view of one."""
    for node in ast.iter_child_nodes(tree):
        yield from _reads(node, names, within_disk or isinstance(node, ast.ClassDef) and node.name == "Disk")
        if within_disk and isinstance(node, ast.Call) and ast.unparse(node.func) in PROPERTIES:
            yield _word(node.args[0])
        if not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in READERS
            and node.args
        ):
            continue
        of, word = node.func.value, node.args[0]
        is_disk = isinstance(of, ast.Name) and (of.id in names or within_disk and of.id == "self")
        if is_disk or isinstance(of, ast.Attribute) and of.attr == "disk" or _is_of_vm(of):
            yield _word(word)


def _word(node: ast.AST) -> str:
    """Return the word of DISK that something stands for: itself, or the name of one of our attributes."""
    if isinstance(node, ast.Attribute) and node.attr == "name":
        return str(getattr(attributes, ast.unparse(node.value).split(".")[-1]).name)
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def read_in(text: str) -> Set[str]:
    """Return the words of DISK that a module reads."""
    tree = parsed(text)
    return {word for word in _reads(tree, _names(tree)) if word.isupper()}  # libvirt's are small


@pytest.mark.fault(23, "what DISK alone says is in one list, and nothing else of it is read")
def test_only_these_words_of_a_disk_are_read() -> None:
    found = {str(path.relative_to(LIB)): read_in(path.read_text()) for path in sorted(LIB.rglob("*.py"))}
    assert set().union(*found.values()) == set(WORDS), {
        path: words - set(WORDS) for path, words in found.items() if words - set(WORDS)
    }


@pytest.mark.fault(23, "an element DISK is had in these places alone, and no word of it by a path")
def test_a_disk_is_had_in_these_places_alone() -> None:
    found = set()
    for path in sorted(LIB.rglob("*.py")):
        said = [node.value for node in nodes(path.read_text()) if isinstance(node, ast.Constant)]
        if "DISK" in said or any(
            isinstance(text, str) and re.match(r"[A-Z_/]*TEMPLATE/DISK", text) for text in said
        ):
            found.add(str(path.relative_to(LIB)))
        assert not any(isinstance(text, str) and re.search(r"\bDISK(\[|/)[A-Z]", text) for text in said), path
    assert found == set(PLACES)


@pytest.mark.fault(23, "who reads another word of DISK is found, whatever the disk is called there")
@pytest.mark.parametrize(
    "text",
    [
        "disk.text('NEW')",
        "disk.text(attributes.NEW.name)",
        "vm.disk(3).text('NEW')",
        "self.disk.number('NEW')",
        "[one.text('NEW') for one in vm.disks]",
        "for one in asked.vm.disks:\n    one.is_yes('NEW')",
        "found = next((one for one in vm.disks if one.id), None)\nfound.text('NEW')",
        "first = vm.disk(0)\nfirst.text('NEW')",
        "def work(wanted: Disk) -> str:\n    return wanted.text('NEW')",
        "def work(wanted: Optional[Disk]) -> str:\n    return wanted.text('NEW')",
        "for item in root.find('TEMPLATE', 'DISK'):\n    item.value('NEW')",
        "class Disk(View):\n    def new(self):\n        return self.text('NEW')",
        "class Disk(View):\n    new = Text('NEW')",
        "class Disk(View):\n    new = Number('NEW', ID_BITS)",
    ],
)
def test_who_reads_another_word_is_found(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "NEW", attributes.Attribute("NEW", ()), raising=False)
    assert read_in(text) == {"NEW"}
