#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Run the tests marked `fault` against the package of an older commit: what did that version do?

    tests/against.py COMMIT [PYTEST-WORDS ...]

The older commit's files are laid out in build/against/COMMIT with the tests of this checkout in place of its
own. What each test said there is merged into docs/faults/COMMIT.json, from which `make docs` writes
docs/reference/faults.md. Tests import modules by their names of today: of a commit that had others (before
lib/semishared/do/ became folders) only those that speak to entry scripts and host sides can run; what the
rest said there was recorded with the tests of 76ea865.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TEMPORARY = re.compile(r"/tmp/pytest-of-[a-z]+/pytest-[0-9]+/|/[^ ']*/build/against/[0-9a-f]+/")


NEWER = re.compile(
    r"(AttributeError: (module|type object) |ImportError|ModuleNotFoundError|AttributeError: <module )"
)
"""What a test says first that calls what the older version does not have."""


def lay_out(commit: str) -> Path:
    """Make the tree of `commit` with the tests of today; return it."""
    tree = ROOT / "build/against" / commit
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "--extract", "--file=-"], cwd=tree, check=True, input=archive)
    shutil.rmtree(tree / "tests")
    shutil.copytree(
        ROOT / "tests", tree / "tests", symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tree)
    (tree / "older_parts.py").write_text(PARTS)
    _name_errors(tree / "lib/semishared/errors.py")
    return tree


PARTS = """
import builtins, importlib.abc, importlib.machinery, sys, types


class Newer:
    def __init__(self, name):
        self.__name__ = name

    def _used(self, *words, **more):
        raise ImportError("newer: " + self.__name__)

    def __getattr__(self, name):
        return self._used() if not name.startswith("__") else object.__getattribute__(self, name)

    __call__ = __iter__ = __getitem__ = __enter__ = _used


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Newer(self.__name__ + "." + name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.startswith("semishared.") else None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        module.__file__ = __file__


def imported(name, globals=None, locals=None, fromlist=(), level=0, real=builtins.__import__):
    module = real(name, globals, locals, fromlist, level)
    for known, one in list(sys.modules.items()):
        if known.startswith("semishared.") and "__getattr__" not in vars(one):
            named = types.SimpleNamespace(__name__=known)
            one.__getattr__ = lambda part, named=named: Module.__getattr__(named, part)
    if name.startswith("semishared"):
        for part in fromlist or ():
            if not hasattr(module, part):
                setattr(module, part, Newer(name + "." + part))
    return module


sys.meta_path.append(Finder())
builtins.__import__ = imported
"""
"""A plugin of pytest: what the older package does not have can be imported, so that tests beside it run, and
ends who uses it.
"""


def _name_errors(errors: Path) -> None:
    """Let tests name the errors that the older version has not: they are never raised there, and that is what
    a test says then.
    """
    known, added = errors.read_text(), []
    for name in re.findall(r"^class (\w+)\(", (ROOT / "lib/semishared/errors.py").read_text(), re.MULTILINE):
        if not re.search(rf"^class {name}\(", known, re.MULTILINE):
            added.append(
                f'\n\nclass {name}(SemisharedError):\n    """Of a newer version."""\n\n    id = '
                f'"{name}"\n    remedy = "none"\n'
            )
    errors.write_text(known + "".join(added))


def outcome(case: ElementTree.Element) -> str:
    """Return 'passed', 'skipped', or 'failed: ' and what was said first; 'not run: ' for a test that needs
    what is not there.
    """
    for child in case:
        said = (child.get("message") or child.tag).strip().splitlines()
        if child.tag == "failure" and said and NEWER.match(said[0]):
            return "not run: it needs parts that are newer"
        if child.tag == "failure":
            return f"failed: {TEMPORARY.sub('', said[0])[:300] if said else child.tag}"
        if child.tag == "error" and NEWER.search(child.get("message") or ""):
            return "not run: it needs parts that are newer"
        if child.tag == "error":
            return (
                "not run: it needs parts that are newer"
                if "collection" in (child.get("message") or "")
                else "not run: no lab"
            )
        if child.tag == "skipped":
            return "skipped"
    return "passed"


def main() -> int:
    """Run the tests there and note what they said."""
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    commit, words = sys.argv[1], sys.argv[2:]
    tree = lay_out(commit)
    xml = tree / "junit.xml"
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "SEMISHARED_FULL": "1"}
    pytest = [
        "/usr/bin/python3",
        "-m",
        "pytest",
        "-q",
        "-p",
        "older_parts",
        "-p",
        "no:cacheprovider",
        "-m",
        "fault",
    ]
    argv = [*pytest, "--continue-on-collection-errors", "-o", "junit_family=xunit1", f"--junitxml={xml}"]
    subprocess.run([*argv, *(words or ["tests"])], cwd=tree, env=env, check=False)
    notes = ROOT / "docs/faults" / f"{commit}.json"
    found: Dict[str, str] = json.loads(notes.read_text()) if notes.exists() else {}
    cases = list(ElementTree.parse(xml).iter("testcase"))
    for file in {case.get("file") for case in cases}:
        found = {
            test: said
            for test, said in found.items()
            if test != f"{file}::{str(file)[:-3].replace('/', '.')}"
        }
    for case in cases:
        # A file that cannot even be collected there has no name of a test.
        found[f"{case.get('file')}::{case.get('name')}"] = outcome(case)
    notes.parent.mkdir(exist_ok=True)
    notes.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    print(f"{notes.relative_to(ROOT)}: {len(found)} tests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
