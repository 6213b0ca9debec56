# SPDX-License-Identifier: Apache-2.0
"""Every reader of files and directories in the package, and what it makes of one that cannot be read
(readers.txt).

A reader that is added fails here until it has a line; one that takes what cannot be read for nothing says
there why that removes nothing. What the readers of records do with damaged ones: tests/tools/test_readers.py.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Dict, Iterator, List, Set, Tuple

import pytest

from unit.sources import parsed

pytestmark = pytest.mark.reads_checkout

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lib/semishared"
TABLE = Path(__file__).with_name("readers.txt")
RECORDS, HINTS = {"files.read_json"}, {"files.hint", "hint"}
LISTINGS = {"os.listdir", "os.scandir", "os.walk"}
OTHERS = {"files.read", "json.load", "json.loads", "open", "read_json"}
BROAD = {
    "OSError",
    "Exception",
    "BaseException",
    "ValueError",
    "EnvironmentError",
    "IOError",
    "BadRecord",
    "SemisharedError",
}
Found = Dict[str, Set[str]]


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_written(call: ast.Call) -> bool:
    """Tell whether an open() is none for reading."""
    mode = (
        call.args[1]
        if len(call.args) > 1
        else next((word.value for word in call.keywords if word.arg == "mode"), None)
    )
    return isinstance(mode, ast.Constant) and "r" not in str(mode.value)


def swallows(handlers: List[ast.ExceptHandler]) -> bool:
    """Tell whether more than absence is caught, and nothing raised for it."""
    for handler in handlers:
        names = (
            {dotted(node) for node in ast.walk(handler.type) if isinstance(node, ast.expr)}
            if handler.type
            else BROAD
        )
        if names & BROAD and not any(isinstance(node, ast.Raise) for node in ast.walk(handler)):
            return True
    return False


def readers(tree: ast.AST, name: str = "", swallowed: bool = False) -> Iterator[Tuple[str, str, bool]]:
    """Yield function, what it calls to read, and whether what cannot be read is taken for nothing there."""
    for field, value in ast.iter_fields(tree):
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST):
                continue
            own = f"{name}.{node.name}" if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else name
            inside = swallowed or (isinstance(tree, ast.Try) and field == "body" and swallows(tree.handlers))
            if isinstance(node, ast.Call):
                called = dotted(node.func)
                if called in RECORDS | HINTS | LISTINGS | OTHERS and not (
                    called == "open" and is_written(node)
                ):
                    yield own.lstrip("."), called, inside or called in HINTS
            yield from readers(node, own, inside)


def found() -> Tuple[Set[str], Set[str]]:
    """Return all readers, and those that take what cannot be read for nothing."""
    everybody, deaf = set(), set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for function, _, swallowed in readers(parsed(path.read_text(encoding="utf-8"))):
            reader = f"{path.relative_to(PACKAGE)}:{function}"
            everybody.add(reader)
            if swallowed:
                deaf.add(reader)
    return everybody, deaf


def table() -> Dict[str, str]:
    """Return why each reader may take what cannot be read for nothing, '' for one that raises."""
    lines = [
        line for line in TABLE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")
    ]
    return {reader: why.strip() for reader, _, why in (line.partition(" ") for line in lines)}


@pytest.mark.fault(30, "each reader of the package is known, and what it makes of a file that cannot be read")
def test_each_reader_is_in_the_table() -> None:
    everybody, deaf = found()
    known = table()
    assert sorted(everybody - set(known)) == [], "give each a line in readers.txt"
    assert sorted(set(known) - everybody) == [], "these are gone: take them out of readers.txt"
    assert sorted(reader for reader in deaf if not known[reader]) == [], (
        "say why what these do not see is not taken for absent"
    )
    assert sorted(reader for reader, why in known.items() if why and reader not in deaf) == [], (
        "these raise: they need no reason"
    )


ASKS = {"os.path.exists", "os.path.lexists"}
DECIDE = (
    "device/systems.py",
    "disk/commits.py",
    "disk/history.py",
    "disk/retained_diffs.py",
    "disk/create.py",
    "disk/recovery.py",
    "disk/retained_diffs.py",
    "disk/vm_dir.py",
    "front/vm_location.py",
    "guest/active_layer.py",
    "guest/freeze.py",
    "guest/go_over.py",
    "guest/go_over_files.py",
    "store/dir/clones.py",
    "store/dir/commit.py",
    "store/dir/content.py",
    "store/dir/journal.py",
    "store/dir/upload.py",
    "tools/files.py",
)
"""By whose word something is removed, given up or taken for done."""


@pytest.mark.fault(
    30, "whoever decides by it that something goes does not call absent what cannot even be looked at"
)
@pytest.mark.parametrize("module", DECIDE)
def test_who_decides_asks_for_absence(module: str) -> None:
    tree = parsed((PACKAGE / module).read_text(encoding="utf-8"))
    found = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and deep(node) in ASKS]
    assert found == [], "files.is_absent tells what is not there from what cannot be asked about"


def deep(node: ast.expr) -> str:
    return f"{deep(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else dotted(node)
