# SPDX-License-Identifier: Apache-2.0
"""The layer rule and the house rules for files, read from the syntax trees of lib/."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from pathlib import Path
from typing import Iterator

import pytest

from semishared import table
from semishared.model.store import datastore_steps
from unit.sources import nodes, parsed

pytestmark = pytest.mark.reads_checkout

LIB = Path(__file__).resolve().parents[2] / "lib"
PACKAGE = LIB / "semishared"
MODULES = sorted(PACKAGE.rglob("*.py"))
PURE = {
    "__future__",
    "collections",
    "dataclasses",
    "difflib",
    "enum",
    "hashlib",
    "itertools",
    "json",
    "math",
    "posixpath",
    "re",
    "typing",
    "xml",
}
"""What plan/ may take from the standard library: nothing that sees the machine or the clock."""
GROUND = {"errors", "units", "config", "named", "model.disk.names", ""}
"""What every layer may import beside those of its row: modules of the package itself, its name and version,
and its words on disk.
"""
VOCABULARIES = sorted((PACKAGE / "model").rglob("*steps.py"))
LAYERS = {
    # layer: the layers below it that it may import, beside itself
    "opennebula": set(),
    "model": set(),
    "tools": set(),
    "plan": {"model", "opennebula"},
    "wire": {"model", "tools"},
    "guest": {"model", "tools"},
    "store": {"model", "tools"},
    "share": {"model", "tools", "store"},
    "intake": {"tools"},
    "device": {"model", "tools", "plan"},
    "base": {"model", "tools", "plan", "device"},
    "stage": {"model", "tools", "plan", "wire", "store", "device", "base"},
    "pool": {"model", "tools", "plan", "device", "base", "stage"},
    "disk": {"model", "tools", "store", "device", "base", "stage", "pool", "guest", "intake"},
    "host": {
        "model",
        "tools",
        "wire",
        "store",
        "device",
        "base",
        "stage",
        "pool",
        "guest",
        "disk",
        "vmm",
        "share",
        "table",
    },
    "front": {"table", "model", "tools", "opennebula", "plan", "wire", "store", "intake"},
    "vmm": {"table", "model", "tools", "opennebula", "plan", "guest", "disk", "share"},
    "install": {"model", "tools", "opennebula", "plan", "wire"},
    "cli": {"model", "tools", "opennebula", "front", "plan", "wire", "install", "guest"},
}
LONGEST = 500
CATALOGUE = "errors.py"
"""The one longer module: a class for each error and nothing that they do, looked up by name. Every action has
to know them all by their ids (`from_id`): in several files they would only be several modules to load at
every start.
"""
FORBIDDEN_NAMES = {"util", "utils", "helpers", "helper", "common", "misc", "manager"}


def dotted(path: Path) -> str:
    parts = path.relative_to(LIB).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {dotted(path) for path in MODULES}


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Return the full name of each module that `path` imports, wherever in the file it does."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    package = dotted(path).split(".") if path.name == "__init__.py" else dotted(path).split(".")[:-1]
    for node in nodes(path.read_text()):
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
    assert "semishared" in set(imports(PACKAGE / "device" / "systems.py"))
    assert {"semishared.errors", "semishared.tools.files", "semishared.model.steps", "os"} <= set(
        imports(PACKAGE / "disk" / "vm_dir.py")
    )
    assert "semishared.host.service" in set(imports(PACKAGE / "hostside.py"))
    assert {"semishared.host.work", "threading"} <= set(imports(PACKAGE / "host" / "service.py"))
    assert "semishared.wire.session" in set(imports(PACKAGE / "front" / "action.py")), (
        "an import inside a function counts"
    )


def of_ours(path: Path) -> Iterator[str]:
    """Yield the modules of the package that `path` imports, without its name."""
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == PACKAGE.name:
            yield rest


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_module_imports_only_what_its_layer_may(path: Path) -> None:
    here = layer(path)
    assert here in LAYERS or not here, f"{here}/ is not in the table of layers"
    for rest in of_ours(path):
        assert rest.split(".")[0] != "cli" or here == "cli", f"{path} imports {rest}: nothing imports cli"
    if here:
        above = {
            rest
            for rest in of_ours(path)
            if rest not in GROUND and rest.split(".")[0] not in {here, *LAYERS[here]}
        }
        assert not above, f"{here}/ may not import what the table does not name"


@pytest.mark.parametrize("name", table.STEPS)
def test_a_step_is_carried_out_by_what_its_machine_may_import(name: str) -> None:
    """What dispatches imports by the table: a host, the front-end, a hypervisor action."""
    vocabulary = next(
        module for module in VOCABULARIES if re.search(rf"^class {name}\(", module.read_text(), re.MULTILINE)
    )
    here = "vmm" if vocabulary.stem in ("hypervisor_steps", "live_steps") else "host"
    if vocabulary.stem == "datastore_steps" and name not in datastore_steps.__all__:
        here = "front"
    row = table.STEPS[name]
    assert row.startswith(".") or re.split("[.:]", row)[0] in {here, *LAYERS[here]}


def test_no_import_closes_a_circle() -> None:
    graph = {
        dotted(path).partition(".")[2]: {rest for rest in of_ours(path) if f"{PACKAGE.name}.{rest}" in NAMES}
        for path in MODULES
    }
    for name in graph:
        graph[name].discard(name)
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the circle


@pytest.mark.parametrize("path", sorted((PACKAGE / "plan").rglob("*.py")), ids=module_id)
def test_planners_see_neither_the_machine_nor_the_clock(path: Path) -> None:
    foreign = {name.split(".")[0] for name in imports(path)} - {"semishared"} - PURE
    assert not foreign, (
        f"{path.name} imports {foreign}: what it needs of the machine is a fact, to be passed in"
    )
    calls = {node.id for node in nodes(path.read_text()) if isinstance(node, ast.Name)}
    assert not calls & {"open", "print", "input", "exec", "eval", "__import__"}


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_only_the_runners_start_programs(path: Path) -> None:
    if "subprocess" in set(imports(path)):
        # install/preflight.py goes to hosts that have nothing of ours.
        runners = (
            "tools/run.py",
            "tools/program.py",
            "wire/session.py",
            "wire/ssh.py",
            "disk/transfer.py",
            "install/preflight.py",
        )
        assert module_id(path) in runners, "use tools.run.run: it knows limits and errors"


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_module_is_small_and_well_named(path: Path) -> None:
    lines = path.read_text().splitlines()
    # A copy of that one is a program.
    if module_id(path) == "share/as_root.py":
        assert lines.pop(0) == "#!/usr/bin/python3 -IS"
    assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"
    assert path.stem not in FORBIDDEN_NAMES
    assert len(lines) <= LONGEST or module_id(path) == CATALOGUE, (
        f"{path} has {len(lines)} lines: split it by what it handles"
    )


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_public_functions_say_in_one_sentence_what_they_do(path: Path) -> None:
    tree = parsed(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            is_short = node.end_lineno is not None and node.end_lineno - node.lineno < 3
            assert ast.get_docstring(node) or is_short, f"{path}: {node.name} has no docstring"


CITED = re.compile(r"\b(CONTRACT|DESIGN|ONED|HOUSE|STYLE|LAB|SEEDS|PEERS|EXPERIMENTS)(\.md| §|: )")


@pytest.mark.parametrize(
    "part", ["lib", "bin", "tm", "datastore", "vmm", "im", "etc", "bench", "docs", "tests"]
)
def test_no_line_cites_a_document_that_is_not_here(part: str) -> None:
    """A fact is stated with its public source; what concerns oned stands in docs/explanation/contract.md."""
    for path in sorted((LIB.parent / part).rglob("*")):
        if (
            path.suffix in {".py", ".md", ".sh", ""}
            and path.is_file()
            and "__pycache__" not in path.parts
            and path != Path(__file__)
        ):
            cited = CITED.search(path.read_text(errors="replace"))
            assert not cited, f"{path} cites {cited and cited[0]}"
