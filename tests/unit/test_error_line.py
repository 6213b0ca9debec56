# SPDX-License-Identifier: Apache-2.0
"""What the user sees of an error at once: its id, what it is about, and why; paths come behind."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Union

import pytest

from semishared import errors
from semishared.opennebula import args
from semishared.opennebula.args import Subject, of_words
from semishared.opennebula.error_line import SHORT, SHOWN, rendered
from unit.sources import nodes

pytestmark = pytest.mark.reads_checkout

ROOT = Path(__file__).resolve().parents[2] / "lib" / "semishared"
IMAGE = "/var/lib/one/datastores/100/4b25f89f25c3c370e509a39f1d1c2a6f"
VM = "/var/lib/one/datastores/103/12"
CLONE = args.FromImage.parse([f"fe:{IMAGE}", f"h1:{VM}/disk.0", "12", "100"])
SUBJECT = of_words(CLONE, 7)
NOUNS = re.compile(r"(VM|image|datastore|host|disk|backup) ?\S")
LONG_PATH = re.compile(r"(?<![\w.])/[^\s'\"]+")


def shown(error: errors.SemisharedError, subject: Subject = SUBJECT) -> str:
    line = rendered(error, "clone", subject)
    assert f"; {error.remedy} [clone" in line and line.endswith("]"), line
    return line[:SHOWN]


@pytest.mark.parametrize(
    "detail, said",
    [
        (f"{IMAGE} is not there on h1", "SS020 image 7 is not there on h1; "),
        (f"image {IMAGE} is no image", "SS020 image 7 is no image; "),
        (f"{IMAGE}.snap/3 is not there", "SS020 image 7 snapshot 3 is not there; "),
        (f"{IMAGE}X is not there", "SS020 datastore 100: 4b25f89f25c3c3.. is not there; "),
        (f"{VM} is not there on h1", "SS020 VM 12 is not there on h1; "),
        (f"{VM}/disk.0 is not there on h1", "SS020 VM 12 disk 0 is not there on h1; "),
        (f"{VM}/disk.0.snap/4 is no link", "SS020 VM 12 disk 0 layer 4 is no link; "),
        (f"{VM}/disk.01/vm.xml is not there", "SS020 VM 12: vm.xml is not there; "),
        (f"{VM}/vm.xml: it cannot be read", "SS020 VM 12: vm.xml: it cannot be read; "),
        (f"{VM}4 is not there", "SS020 VM 12 disk 0: 124 is not there; "),
        ("/var/lib/one/datastores/100 is empty", "SS020 datastore 100 is empty; "),
        ("/var/lib/one/datastores/104 on h2 is empty", "SS020 datastore 104 on h2 is empty; "),
        ("/home/me/datastores/104 is empty", "SS020 VM 12 disk 0: 104 is empty; "),
        ("snapshot 3 of disk 0 is not there", "SS020 VM 12 disk 0: snapshot 3 is not there; "),
        ("FS of disk 0 of VM 12 is 'x'", "SS020 VM 12 disk 0: FS is 'x'; "),
        ("FS of disk 01 of VM 12 is 'x'", "SS020 VM 12 disk 0: FS of disk 01 of VM 12 is 'x'; "),
        ("the record of disk 2 is gone", "SS020 VM 12 disk 0: the record of disk 2 is gone; "),
        (f"base 100-7-{'8e' * 16} is not there", "SS020 VM 12 disk 0: base 100-7-8e8e8e8e.. is not there; "),
        ("disk 3 has no record", "SS020 VM 12 disk 3 has no record; "),
        (f"disk 3: {VM}/disk.3 is no link", "SS020 VM 12 disk 3 is no link; "),
        (f"disk 3: {VM}/disk.4 is no link", "SS020 VM 12 disk 3: VM 12 disk 4 is no link; "),
        (f"disk 3 of {VM} has no record", "SS020 disk 3 of VM 12 has no record; "),
        ("host h1 ended with code 1", "SS020 host h1 ended with code 1; "),
        ("404 is not a number", "SS020 VM 12 disk 0: 404 is not a number; "),
        ("/srv is not there", "SS020 VM 12 disk 0: /srv is not there; "),
        (
            "https://mirror.example.org/pub/x.qcow2 answers 404",
            "SS020 VM 12 disk 0: mirror.example.org answers 404; ",
        ),
        (
            f"qemu-img convert -O raw '{IMAGE}' x: exit code 1: qemu-img: Could not open '{IMAGE}': Bad",
            "SS020 VM 12 disk 0: qemu-img: Could not open 'image 7': Bad (exit code 1); ",
        ),
        ("sudo -n rm x: exit code 1: said nothing", "SS020 VM 12 disk 0: sudo: said nothing (exit code 1); "),
        ("h1:/var/lib/one/x is no place", "SS020 VM 12 disk 0: h1:/var/lib/one/x is no place; "),
        (
            f"it is not there: {'x' * 40} {IMAGE}",
            f"SS020 VM 12 disk 0: it is not there: {'x' * 40} {IMAGE}; ",
        ),
    ],
)
def test_words_of_the_user_are_in_the_place_of_paths(detail: str, said: str) -> None:
    line = rendered(errors.MissingImage(detail), "clone", SUBJECT)
    assert line.startswith(said), line
    # What was there is not lost: an operator who has to go there finds it at the end.
    assert all(path.rstrip(":") in line for path in LONG_PATH.findall(detail)), line


def test_a_pools_image_has_its_number_too_and_its_clones_have_not() -> None:
    words = args.FromImage.parse(["fe:one/one-7", f"h1:{VM}/disk.0", "12", "100"])
    line = rendered(errors.ImageInUse("one/one-7 has clones: one/one-7-12-0"), "ln", of_words(words, 7))
    assert line.startswith("SS029 image 7 has clones: one/one-7-12-0; ") and line.endswith("[ln; one/one-7]")
    assert rendered(errors.ImageInUse("one/one-7: x"), "ln", of_words(words)).startswith(
        "SS029 VM 12 disk 0: its image: x; "
    )


@pytest.mark.fault(58, "what an error is about is said once in what oned shows of it")
@pytest.mark.parametrize(
    "noun, detail, said",
    [
        (
            "image 110",
            "SEMISHARED_LOCAL = copy of image 110 contradicts x",
            "SEMISHARED_LOCAL = copy contradicts x",
        ),
        ("image 110", "SIZE of image 110 is 0 MiB", "SIZE is 0 MiB"),
        ("datastore 100", "no bridge of datastore 100 answers", "no bridge answers"),
        ("datastore 100", "NFS_AUTO_ENABLE of datastore 100 is yes", "NFS_AUTO_ENABLE is yes"),
        ("VM 12", "FS_FREEZE = x of VM 12 is not one", "FS_FREEZE = x is not one"),
        ("VM 12", "snapshot 3 of disk 1 of VM 12 is not there", "snapshot 3 of disk 1 is not there"),
        # Of another, and what is not the thing's own.
        ("image 11", "SIZE of image 110 is 0 MiB", "SIZE of image 110 is 0 MiB"),
        ("VM 12", "FS of VM 12 disk 1 is 'x'", "FS of VM 12 disk 1 is 'x'"),
        ("image 7", "a copy of image 7 is there", "a copy of image 7 is there"),
        ("image 7", "x is no clone of image 7", "x is no clone of image 7"),
        ("VM 12", "nothing but SIZE of VM 12", "nothing but SIZE of VM 12"),
    ],
)
def test_what_an_error_is_about_is_said_once(noun: str, detail: str, said: str) -> None:
    line = rendered(errors.BadAttribute(detail), "cp", Subject(noun))
    assert line.startswith(f"SS002 {noun}: {said}; "), line


def test_before_the_words_are_understood_the_action_is_the_noun() -> None:
    line = rendered(errors.BadArguments("0 arguments where 4 belong"), "clone", None)
    assert line == f"SS001 clone: 0 arguments where 4 belong; {errors.BadArguments.remedy} [clone]"


@pytest.mark.parametrize(
    "words, noun",
    [
        (args.Move.parse([f"h1:{VM}", f"h2:{VM}", "12", "103"]), "VM 12"),
        (args.Delete.parse([f"h1:{VM}", "12", "103"]), "VM 12"),
        (args.Delete.parse([f"h1:{VM}/disk.1", "12", "103"]), "VM 12 disk 1"),
        (args.ToImage.parse([f"h1:{VM}/disk.1", IMAGE, "12", "100"]), "VM 12 disk 1"),
        (args.Migrate.parse(["h1", "h2", VM, "12", "103"]), "VM 12"),
        (args.Backup.parse([f"h1:{VM}", "0:1", "one-12", "-", "12", "103"]), "VM 12"),
        (args.Restore.parse([f"h1:{VM}", "12", "9", "-1", "-1"]), "VM 12"),
        (args.Resize.parse([f"h1:{VM}/disk.2", "8", "12", "100"]), "VM 12 disk 2"),
        (args.NewDisk.parse(["8", "raw", f"h1:{VM}/disk.2", "12", "103"]), "VM 12 disk 2"),
        (args.FromImage.parse([f"fe:{IMAGE}", f"h1:{VM}/kernel", "12", "2"]), "VM 12 kernel"),
    ],
)
def test_the_words_of_every_shape_say_what_the_action_is_about(words: object, noun: str) -> None:
    assert isinstance(words, tuple)
    found = of_words(words)
    assert (found.noun, found.vm, found.names[VM]) == (noun, 12, "VM 12")


@cache
def raised() -> list[tuple[str, type[errors.SemisharedError], list[Union[str, None]]]]:
    """Return where an error is raised for oned, its class, and its text; None stands for a value in that."""
    known, found = {error.__name__: error for error in errors.catalogue()}, []
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).parts[0] in ("cli", "install", "errors.py"):
            continue
        for node in nodes(path.read_text()):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in known
                and node.args
            ):
                text = node.args[0]
                if isinstance(text, (ast.JoinedStr, ast.Constant)):
                    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                    values = [str(part.value) if isinstance(part, ast.Constant) else None for part in parts]
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno}", known[node.func.id], values))
    return found


@pytest.mark.parametrize("value", [IMAGE, f"{VM}/disk.0", f"{VM}/disk.0.snap/3", f"{IMAGE}0/x" * 3, "x7"])
def test_every_error_begins_with_id_and_noun_and_has_no_path_before_its_reason(value: str) -> None:
    count = 0
    for where, error, parts in raised():
        detail = "".join(value if part is None else part for part in parts)
        line, count = shown(error(detail)), count + 1
        assert re.match(rf"{error.id} [A-Za-z]", line), (where, line)
        assert NOUNS.search(line), (where, line)
        assert all(len(path) <= SHORT + 2 for path in LONG_PATH.findall(line)), (where, line)
        # Something of what is said of it, not of the values in it alone.
        words = [word for part in parts if part for word in re.findall(r"[A-Za-z]{2,}", part)]
        assert not words or any(word in line for word in words), (where, line)
    assert count > 600
