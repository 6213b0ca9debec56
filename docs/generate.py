#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Write the generated pages of docs/reference (`make docs`); with --check, say which ones are out of date."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[0:0] = [str(DOCS.parent / "lib"), str(DOCS)]

import fault_table  # noqa: E402

from semishared.errors import SemisharedError, catalogue  # noqa: E402

ERRORS = """<!-- Generated from lib/semishared/errors.py by `make docs`. -->
# Errors

An action that fails ends with one line, which OpenNebula shows as the ERROR of the VM or image:

    clone: DETAIL; WHAT TO DO [ID]

Exit code 1 means refused or failed as described here, 2 a defect of semishared (its traceback is in the log lines).
Ids are stable.

| id | what it is | what to do |
|---|---|---|
"""  # noqa: E501


def _name(error: type[SemisharedError]) -> str:
    words = "".join(f" {c.lower()}" if c.isupper() else c for c in error.__name__)
    return words.strip()


def errors() -> str:
    """Return the page of errors."""
    rows = []
    for error in catalogue():
        meaning = " ".join((error.__doc__ or "").split())
        remedy = f"{error.remedy[:1].upper()}{error.remedy[1:]}."
        rows.append(f'| <a id="{error.id}"></a>{error.id} {_name(error)} | {meaning} | {remedy} |')
    return ERRORS + "\n".join(rows).replace("SEMISHARED_*", "SEMISHARED_\\*") + "\n"


PAGES = {"reference/errors.md": errors, "reference/faults.md": fault_table.page}


def main(argv: list[str]) -> int:
    """Write all pages, or check them."""
    stale = 0
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in argv:
            print(f"docs/{name} is out of date: run `make docs`", file=sys.stderr)
            stale = 1
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"docs/{name} written")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
