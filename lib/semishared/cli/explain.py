# SPDX-License-Identifier: Apache-2.0
"""Say what an error means and what to do about it, or print a page of the documentation; nothing is asked.

  explain            all errors, a line each, and where the pages are
  explain SS024      what it is, what to do, and the pages that it names
  explain PAGE       a page as a line of ours names it: docs/how-to/nfs.md, or how-to/nfs

exit codes: 0 printed; 2 there is no such error or page
"""

from __future__ import annotations

import argparse
import os
import re
from typing import Optional

from ..errors import BadArguments, SemisharedError, catalogue
from ..named import NamedTuple, to_data
from . import command as on
from .command import argument, put, put_all

ARGUMENTS = (
    argument("what", nargs="?", metavar="ID|PAGE", help="an id (SS024), or a page; without it all ids"),
    on.JSON,
)
PAGES = "docs"
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PLACES = (f"{PACKAGE}/{PAGES}", f"{PACKAGE}/../../{PAGES}", f"/usr/share/doc/semishared/{PAGES}")
"""Where pages lie: as install.sh puts them, in a checkout, as a package of the distribution has them."""
PAGE = re.compile(r"docs/[A-Za-z0-9_/-]+\.md")


class Explained(NamedTuple):
    """An error, as docs/reference/errors.md has it."""

    id: str
    name: str
    meaning: str
    remedy: str
    pages: list[str]
    """Those that the remedy names, without docs/."""


def explained(error: type[SemisharedError]) -> Explained:
    """Return what errors.py says of an error."""
    words = "".join(f" {c.lower()}" if c.isupper() else c for c in error.__name__).strip()
    meaning = " ".join((error.__doc__ or "").split())
    remedy = f"{error.remedy[:1].upper()}{error.remedy[1:]}."
    if error.remedy.startswith(f"{PAGES}/"):
        remedy = f"{error.remedy}."
    return Explained(error.id, words, meaning, remedy, PAGE.findall(error.remedy))


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared explain`."""
    word: Optional[str] = arguments.what
    rows = [explained(error) for error in catalogue()]
    if word is not None:
        rows = [row for row in rows if row.id == word.upper()]
    if word is not None and not rows:
        if arguments.json:
            raise BadArguments(f"no error {word!r}")
        path = page_of(word)
        if not path:
            raise BadArguments(f"no error or page {word!r}; `semishared explain` lists all errors")
        with open(path, encoding="utf-8") as file:
            put_all(file.read())
        return 0
    if arguments.json:
        on.put_json({"errors": to_data(rows)})
    elif word is None:
        on.table("ID|ERROR", [[row.id, row.name] for row in rows])
        put()
        put(f"pages: {place() or 'none is installed'}")
    else:
        show(rows[0])
    return 0


def show(row: Explained) -> None:
    """Print an error for a person."""
    on.table(f"{row.id}|{row.name}", [["what", row.meaning], ["to do", row.remedy]])
    for page in row.pages:
        put(f"page   {page_of(page) or page}")


def place() -> str:
    """Return the directory of the pages, '' if none is installed."""
    return next((os.path.normpath(path) for path in PLACES if os.path.isdir(f"{path}/reference")), "")


def page_of(name: str) -> str:
    """Return the path of a page, '' if there is none; its name may lack docs/ and .md."""
    name = name.removeprefix(f"{PAGES}/").partition("#")[0].removesuffix(".md")
    if not place() or not re.fullmatch(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)?", name):
        return ""
    path = f"{place()}/{name}.md"
    return path if os.path.isfile(path) else ""
