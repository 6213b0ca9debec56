# SPDX-License-Identifier: Apache-2.0
"""`semishared explain`: what it says is errors.py's, and the pages that our lines name are there."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Iterator

import pytest

from semishared.cli import doctor, explain, main
from semishared.errors import catalogue
from semishared.plan.care.checks import Finding

pytestmark = pytest.mark.reads_checkout

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("error", catalogue(), ids=lambda error: error.id)
def test_an_error_is_explained_as_its_page_does(
    error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    row = next(explain.explained(cls) for cls in catalogue() if cls is error)
    assert main.main(["explain", row.id.lower()]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"{row.id} {row.name} what {row.meaning} to do {row.remedy}")
    for page in row.pages:
        assert said.endswith(str(ROOT / page))


def test_all_errors_are_listed_a_line_each_and_where_the_pages_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == [cls.id for cls in catalogue()]
    assert lines[-1] == f"pages: {ROOT / 'docs'}"
    assert main.main(["explain", "--json", "SS024"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["errors"]
    assert row["id"] == "SS024" and row["remedy"].startswith("Mount the image datastore")


def test_what_there_is_not_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for word in (
        "SS998",
        "nosuch",
        "docs/how-to/nosuch.md",
        "../README",
        "/etc/passwd",
        "docs/../README.md",
        "",
    ):
        assert main.main(["explain", word]) == 2
        said = capsys.readouterr()
        assert not said.out and said.err.count("\n") == 1 and repr(word) in said.err


def test_a_page_is_printed_by_the_name_that_lines_give_it(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("docs/how-to/nfs.md", "how-to/nfs", "docs/how-to/apparmor.md#selinux"):
        assert main.main(["explain", word]) == 0
        assert capsys.readouterr().out.startswith("# ")


@pytest.mark.parametrize("mend", ["docs/how-to/nfs.md, Fences", "as root on h1: mount /x"])
def test_doctor_says_where_the_pages_are_that_its_lines_name(
    mend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor.show([Finding(2, "h1", "the store is not mounted", mend)], {})
    lines = capsys.readouterr().out.splitlines()
    said = f"pages are in {ROOT / 'docs'}; `semishared explain PAGE` prints one"
    assert (said in lines) == ("docs/" in mend) and lines[-1] == "0 machines: 1 broken, 0 warnings"


def named() -> Iterator[tuple[str, str]]:
    """Yield each page that a text of ours names, with the module; not in comments, nor where a docstring is
    no help of a verb.
    """
    for path in sorted((ROOT / "lib").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documents = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and path.parent.name != "cli"
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
                for name in re.findall(r"[\w./-]+\.md\b", re.sub(r"\]\([^)]*\)", "", node.value)):
                    yield name, str(path.relative_to(ROOT))
    for name in re.findall(r"[\w./-]+\.md\b", (ROOT / "install.sh").read_text()):
        yield name, "install.sh"


@pytest.mark.fault(80, "a page that a line names is installed, and `explain` prints it by that name")
def test_pages_that_lines_name_are_there() -> None:
    found = list(named())
    assert len(found) > 40
    for name, where in found:
        assert name.startswith("docs/") and explain.page_of(name) == str(ROOT / name), f"{where}: {name}"
