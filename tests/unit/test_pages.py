# SPDX-License-Identifier: Apache-2.0
"""Pages of docs/ and the README: links lead somewhere, pages are short, numbers are those of the tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import words

pytestmark = pytest.mark.reads_checkout

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LONGEST = 200
TERMS = 40


def anchors(page: Path) -> set[str]:
    """Return what links may name on a page: its headings, as GitHub makes anchors of them, and its ids."""
    text = words.FENCED.sub("", page.read_text())
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain} | set(
        re.findall(r'<a id="([^"]+)">', text)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_there_are(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", words.FENCED.sub("", page.read_text()))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_is_long_but_references(page: Path) -> None:
    if page.parent.name != "reference":
        assert len(page.read_text().splitlines()) <= LONGEST, "split it by what its reader wants to do"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT / "docs"))
        assert name == "README.md" or f"({name})" in index, name


def test_glossary_is_short_and_in_order() -> None:
    page = (ROOT / "docs/reference/glossary.md").read_text()
    terms = re.findall(r"^\| ([^|]+) \| [^|]+\. \|$", page, re.MULTILINE)
    assert len(terms) == page.count("\n| ") - 1, "each is one sentence"
    assert terms == sorted(terms, key=str.lower) and len(terms) <= TERMS


def test_numbers_of_the_readme_are_those_of_the_bench_and_of_the_faults() -> None:
    readme = (ROOT / "README.md").read_text()
    bench = (ROOT / "docs/reference/benchmarks.md").read_text()
    faults = (ROOT / "docs/reference/faults.md").read_text()

    def measured(row: str) -> str:
        found = re.search(rf"^\| {re.escape(row)} \| ([0-9.]+) ", bench, re.MULTILINE)
        assert found, f"no row: {row}"
        return found[1]

    zero = measured("read from the store by a further clone, 1 GiB image")
    large, small = (measured(f"further clone of a {size} image") for size in ("1 GiB", "16 MiB"))
    assert f"**{zero} bytes**" in readme and f"after {large} s for 1 GiB, {small} s for 16 MiB" in readme
    assert (
        f"**{measured('read from the store by these 8, by the image' + chr(39) + 's size')} times**" in readme
    )
    kinds = re.findall(r"^## ([0-9]+)\. ", faults, re.MULTILINE)
    assert f"**{len(kinds)} kinds**" in readme
