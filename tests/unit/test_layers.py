# SPDX-License-Identifier: Apache-2.0
"""The layer rule and the house rules for files, read from the syntax trees of lib/."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from typing import Iterator

import pytest

pytestmark = pytest.mark.reads_checkout

LIB = Path(__file__).resolve().parents[2] / "lib"
PACKAGE = LIB / "semishared"
MODULES = sorted(PACKAGE.rglob("*.py"))
PURE = {"__future__", "collections", "dataclasses", "difflib", "enum", "itertools", "json", "posixpath", "re", "typing", "xml"}
"""What plan/ may take from the standard library: nothing that sees the machine or the clock."""
RULES = {
    # layer: what of the package it may import
    "plan": {"plan", "opennebula", "errors", "units"},
    "do": {"do", "plan.steps", "plan.base_steps", "plan.image_steps", "plan.network_disk", "opennebula", "errors", "units", "config", ""},
    "opennebula": {"opennebula", "errors", "units"},
}
FORBIDDEN_NAMES = {"util", "utils", "helpers", "helper", "common", "misc", "manager"}


def dotted(path: Path) -> str:
    parts = path.relative_to(LIB).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {dotted(path) for path in MODULES}


def imports(path: Path) -> Iterator[str]:
    """Yield the full name of each module that `path` imports, wherever in the file it does."""
    package = dotted(path).split(".") if path.name == "__init__.py" else dotted(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{module}.{alias.name}"
                yield name if name in NAMES else module


def layer(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def module_id(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_imports_are_found_in_all_their_spellings() -> None:
    assert {"semishared", "semishared.errors", "semishared.do.files", "semishared.plan.steps", "os"} <= set(
        imports(PACKAGE / "do" / "vm_dir.py")
    )
    assert {"semishared.do.execute", "threading"} <= set(imports(PACKAGE / "hostside.py"))
    assert "semishared.do.ssh" in set(imports(PACKAGE / "tm.py")), "an import inside a function counts"


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_module_imports_only_what_its_layer_may(path: Path) -> None:
    allowed = RULES.get(layer(path))
    for name in imports(path):
        top, _, rest = name.partition(".")
        assert rest.split(".")[0] != "cli" or layer(path) == "cli", f"{path} imports {name}: nothing imports cli"
        if allowed is not None and top == "semishared":
            assert rest in allowed or rest.split(".")[0] in allowed - {""}, f"{layer(path)}/ may not import {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "plan").glob("*.py")), ids=module_id)
def test_planners_see_neither_the_machine_nor_the_clock(path: Path) -> None:
    foreign = {name.split(".")[0] for name in imports(path)} - {"semishared"} - PURE
    assert not foreign, f"{path.name} imports {foreign}: what it needs of the machine is a fact, to be passed in"
    calls = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    assert not calls & {"open", "print", "input", "exec", "eval", "__import__"}


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_only_the_runners_start_programs(path: Path) -> None:
    if "subprocess" in set(imports(path)):
        # examination.py goes to hosts that have nothing of ours.
        runners = ("do/run.py", "do/ssh.py", "do/transfer.py", "examination.py")
        assert module_id(path) in runners, "use do.run.run: it knows limits and errors"


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_module_is_small_and_well_named(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"
    assert path.stem not in FORBIDDEN_NAMES
    assert len(lines) <= 400, f"{path} has {len(lines)} lines: split it by what it handles"
    if len(lines) > 300:
        warnings.warn(f"{path} has {len(lines)} lines, 300 is the alarm", stacklevel=1)


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_public_functions_say_in_one_sentence_what_they_do(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            is_short = node.end_lineno is not None and node.end_lineno - node.lineno < 3
            assert ast.get_docstring(node) or is_short, f"{path}: {node.name} has no docstring"
