#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the house: print a table of this checkout, or of others, also older ones.

    git worktree add /tmp/before 2a155d3f && tests/house.py /tmp/before .

How each line is counted:

modules, lines      files *.py below lib/ and all of their lines; the same after `ruff format` at 110 columns
below 60 lines      modules of fewer lines, without `__init__.py`
dispatch            sites: classes with three or more methods that have names of steps, and tables with three
                    or more keys that are names of steps, outside of model/, plan/ and cli/. Steps: classes
                    of those modules of model/ that have `steps` in their names
is there a pool?    calls of ASKS_POOL in the modules of OF_DEVICES, outside of the rooms of those modules:
                    functions that answer differently on a host with a pool and on one without; also, as
                    device/folders.py is asked, the UUID of a folder's device. Whether a folder's device fails
                    is asked of any folder, and does not count. Within it: such calls in device/folders.py
is there a bridge?  each read of `has_bridge`, or of `is_mounted`, which came for it
look-ups by string  each `x["name"]` and `x.get("name")` in the rooms of READS_ANSWERS: answers, and rows of
                    the command, of which mypy sees no field. Shapes by hand: lines of model/answers.py
way of a step       modules of lib/ with a function that runs between begin and end of disk/detach.detach,
                    while tests/tools/test_detach.py detaches a disk with two snapshots from its store (with
                    qemu-img)
start of an action  Python instructions until the first program starts (of the host side: until it waits for a
                    plan), as tests/unit/test_start_up.py counts them, for each action in MOST there

`-` says that this checkout, or this machine without ruff or qemu-img, has nothing to count.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, Iterator, List, Set, Tuple

HERE = Path(__file__).resolve().parents[1]
COLUMNS = "110"
SLIVER = 60
FEWEST = 3
ASKS_POOL = {
    "device_of",
    "is_linked",
    "in_memory",
    "layers_links",
    "link_of",
    "may_hold",
    "may_move",
    "present",
    "registered",
    "takes_layers",
    "takes_nothing",
    "usual",
    "where",
}
OF_DEVICES = {
    "device",
    "devices",
    "folders",
    "in_memory",
    "links",
    "memory",
    "missing",
    "offline",
    "on_devices",
    "ram",
}
FOLDERS, ASKS_WITHIN = "device/folders.py", {"isinstance", "_may_hold"}
DECIDES_NOTHING = {"model", "plan", "cli"}
READS_ANSWERS = {"plan", "front", "vmm", "cli"}
TRACER = """
import sys as _sys, threading as _threading
def _way(out):
    found, within = set(), []
    def call(frame, event, argument):
        code = frame.f_code
        begins = code.co_name == "detach" and code.co_filename.endswith("/semishared/disk/detach.py")
        if event == "call" and begins:
            within.append(frame)
        is_ours = "/lib/semishared/" in code.co_filename and code.co_name != "<module>"
        if within and event == "call" and is_ours:
            found.add(code.co_filename.rpartition("/lib/semishared/")[2])
        if event == "return" and within and frame is within[-1]:
            within.pop()
            with open(out, "a") as file:
                file.write(" ".join(sorted(found)) + chr(10))
    _sys.setprofile(call)
    _threading.setprofile(call)
_way({out!r})
"""
STARTS = """
import importlib.util, sys, tempfile
from pathlib import Path
spec = importlib.util.spec_from_file_location("start_up", "tests/unit/test_start_up.py")
start_up = importlib.util.module_from_spec(spec)
spec.loader.exec_module(start_up)
for name in start_up.MOST:
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        if name == "hostside":
            code, data = start_up.HOST_SIDE, b""
        else:
            speaks = name in getattr(start_up, "SPEAKS_FIRST", ())
            try:
                code = start_up.program(name, top, recorded=not speaks)
            except TypeError:
                code = start_up.program(name, top)
            data = start_up.standard_input(name, top)
        print(name, start_up.counted(code, top, data))
"""


class House:
    """A checkout: the syntax trees of its package."""

    def __init__(self, top: Path) -> None:
        self.top, self.package = top, top / "lib/semishared"
        self.texts = {path: path.read_text(encoding="utf-8") for path in sorted((top / "lib").rglob("*.py"))}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}

    def room(self, path: Path) -> str:
        """Return the room of a module of the package, '' for one of no room."""
        parts = path.relative_to(self.package).parts
        return parts[0] if len(parts) > 1 else ""

    def lines(self) -> int:
        return sum(len(text.splitlines()) for text in self.texts.values())

    def formatted(self) -> str:
        """Return how many lines `ruff format` would make of it at 110 columns."""
        ruff = shutil.which("ruff", path=f"{HERE}/build/venv/bin:{os.environ['PATH']}")
        if not ruff:
            return "-"
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(self.top / "lib", Path(folder, "lib"))
            argv = [ruff, "format", "--quiet", "--isolated", "--no-cache", "--line-length", COLUMNS]
            subprocess.run([*argv, "--target-version", "py39", f"{folder}/lib"], check=True)
            return str(House(Path(folder)).lines())

    def slivers(self) -> int:
        return sum(
            len(text.splitlines()) < SLIVER for path, text in self.texts.items() if path.name != "__init__.py"
        )

    def steps(self) -> Set[str]:
        """Return the names of all steps: where some classes of a module are `Step[...]`, these alone."""
        found: Set[str] = set()
        for path, tree in self.trees.items():
            if self.room(path) == "model" and "steps" in path.stem:
                classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.bases]
                typed = [node for node in classes if ast.unparse(node.bases[0]).startswith("Step")]
                found |= {node.name for node in typed or classes if not node.name.startswith("_")}
        return found

    def sites(self) -> Iterator[Tuple[str, int]]:
        """Yield where steps are dispatched, and how many are there."""
        steps = self.steps()
        for path, tree in self.trees.items():
            if self.room(path) in DECIDES_NOTHING:
                continue
            for node in ast.walk(tree):
                names: Set[object] = set()
                if isinstance(node, ast.ClassDef):
                    names = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
                elif isinstance(node, ast.Dict):
                    names = {key.value for key in node.keys if isinstance(key, ast.Constant)}
                    names |= {key.attr for key in node.keys if isinstance(key, ast.Attribute)}
                if len(names & steps) >= FEWEST:
                    yield f"{path.relative_to(self.package)}", len(names & steps)

    def pool_questions(self) -> Tuple[int, int, int]:
        """Return how often it is asked whether there is a pool, in how many modules, and in FOLDERS."""
        asked = [
            path for path, tree in self.trees.items() for node in ast.walk(tree) if self._asks(path, node)
        ]
        outside = [
            path
            for path in asked
            if self.room(path) not in ("device", "pool")
            and not (self.room(path) == "base" and path.stem in OF_DEVICES)
        ]
        return len(outside), len(set(outside)), asked.count(self.package / FOLDERS)

    def _asks(self, path: Path, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and node.attr == "uuid":
            return ast.unparse(node.value).startswith("folders.at(")
        if not isinstance(node, ast.Call):
            return False
        whose, _, name = ast.unparse(node.func).rpartition(".")
        if path == self.package / FOLDERS and not whose and name in ASKS_WITHIN:
            return True
        return whose in OF_DEVICES and name in ASKS_POOL

    def bridge_questions(self) -> Tuple[int, int]:
        """Return how often it is asked whether a store has a bridge, and in how many modules."""
        found = [
            path
            for path, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in ("has_bridge", "is_mounted")
        ]
        return len(found), len(set(found))

    def lookups(self) -> Tuple[int, int]:
        """Return how often a field is named by a string where answers are read, and in how many modules."""
        found: List[Path] = []
        for path, tree in self.trees.items():
            for node in ast.walk(tree) if self.room(path) in READS_ANSWERS else ():
                key: object = None
                if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                    key = node.slice
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                    key = node.args[0] if node.func.attr == "get" else None
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    found.append(path)
        return len(found), len(set(found))

    def by_hand(self) -> str:
        """Return the lines of the table of shapes."""
        found = self.texts.get(self.package / "model/answers.py")
        return str(len(found.splitlines())) if found else "-"

    def way(self) -> str:
        """Return how many modules the step of a detachment passes."""
        test = self.top / "tests/tools/test_detach.py"
        if not test.exists() or not shutil.which("qemu-img"):
            return "-"
        with tempfile.TemporaryDirectory() as folder:
            copy, out = Path(folder, "checkout"), Path(folder, "way")
            leave = shutil.ignore_patterns("build", ".git", "__pycache__")
            shutil.copytree(self.top, copy, ignore=leave, symlinks=True)
            # The host side is a process of its own, started without any environment of Python's.
            face = copy / "lib/semishared/__init__.py"
            head, future, rest = face.read_text().partition("from __future__ import annotations\n")
            tracer = TRACER.format(out=str(out))
            face.write_text(f"{head}{future}{tracer}{rest}" if future else f"{head}{tracer}")
            argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "off_the_layers"]
            env = {**os.environ, "PYTHONPATH": f"{copy}/tests:{copy}/lib", "PYTHONDONTWRITEBYTECODE": "1"}
            subprocess.run(
                [*argv, str(copy / "tests/tools/test_detach.py")],
                cwd=copy,
                env=env,
                stdout=subprocess.DEVNULL,
                check=False,
                timeout=300,
            )
            ways = [line.split() for line in out.read_text().splitlines()] if out.exists() else []
        return str(max(map(len, ways))) if ways else "-"

    def starts(self) -> Dict[str, str]:
        """Return the instructions of the starts that the checkout itself bounds."""
        argv = [sys.executable, "-c", STARTS]
        env = {**os.environ, "PYTHONPATH": "tests:lib"}
        done = subprocess.run(argv, cwd=self.top, env=env, capture_output=True, check=False, timeout=300)
        return dict(line.rsplit(" ", 1) for line in done.stdout.decode().splitlines() if line.count(" ") == 1)

    def table(self) -> Dict[str, str]:
        """Return what is printed, line by line."""
        sites = list(self.sites())
        return {
            "modules": str(len(self.texts)),
            "lines": str(self.lines()),
            f"lines at {COLUMNS} columns": self.formatted(),
            f"modules below {SLIVER} lines": str(self.slivers()),
            "steps": str(len(self.steps())),
            "sites of dispatch (steps there)": f"{len(sites)} ({sum(count for _, count in sites)})",
            "is there a pool? (modules; within it)": "{} ({}; {})".format(*self.pool_questions()),
            "is there a bridge? (modules)": "{} ({})".format(*self.bridge_questions()),
            "look-ups by string (modules)": "{} ({})".format(*self.lookups()),
            "lines of model/answers.py": self.by_hand(),
            "way of a step: disk/detach, modules": self.way(),
            **{f"start of {name}, instructions": count for name, count in self.starts().items()},
        }


def main(argv: List[str]) -> int:
    """Print a table of the checkouts that are named, or of this one."""
    tops = [Path(name).resolve() for name in argv] or [HERE]
    for top in tops:
        if not (top / "lib/semishared").is_dir():
            print(f"house: {top} is no checkout", file=sys.stderr)
            return 2
    tables = [House(top).table() for top in tops]
    names = list(dict.fromkeys(name for table in tables for name in table))
    print("| | " + " | ".join(top.name for top in tops) + " |")
    print("|---" * (len(tops) + 1) + "|")
    for name in names:
        print(f"| {name} | " + " | ".join(table.get(name, "-") for table in tables) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
