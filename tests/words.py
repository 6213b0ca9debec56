#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Find words that hide the subject of a sentence: in docs/, and in docstrings and comments of lib/.

tests/lint.sh runs it. Quoted text (code, blocks of code, text in "quotes"), generated pages and generated
tables do not count. A page has none of these words. lib/ has at most CEILING of them: lower it when
you remove some, never raise it; it goes to 0. `tests/words.py --lib` prints those of lib/.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import Iterator

ROOT = Path(__file__).resolve().parents[1]
CEILING = 0
BE = r"(?:is|are|was|were|be|been|being)"
BANNED = re.compile(
    rf"\b(?:who|whom|whoever|whomever|somebody|nobody|what lies below|{BE} had|{BE} told of)\b", re.IGNORECASE
)
GENERATED = re.compile(r"<!-- Generated from ")
TABLE = re.compile(r"<!-- bench: .*?<!-- end -->", re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4,}.*(?:\n|$)|\n(?= {4}))+")
QUOTED = re.compile(r"``[^`]+``|`[^`]+`|\"[^\"\n]{1,200}\"|<!--.*?-->", re.DOTALL)


def blank(match: re.Match[str]) -> str:
    """Return what a match is replaced by: as many lines, and no word."""
    return "\n" * match[0].count("\n")


def in_text(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and words of each banned one that is not quoted."""
    for quoting in (TABLE, FENCED, INDENTED, QUOTED):
        text = quoting.sub(blank, text)
    for found in BANNED.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, found[0]


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment and docstring (also of attributes) of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        said = node.value if isinstance(node, ast.Expr) else None
        if isinstance(said, ast.Constant) and isinstance(said.value, str):
            yield said.lineno, inspect.cleandoc(said.value)


def in_pages() -> Iterator[str]:
    """Yield a line for each banned word of docs/."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if not GENERATED.match(text):
            for line, word in in_text(text):
                yield f"{page.relative_to(ROOT)}:{line}: {word}"


def in_package() -> Iterator[str]:
    """Yield a line for each banned word of lib/."""
    for path in sorted((ROOT / "lib").rglob("*.py")):
        for first, text in prose(path.read_text(encoding="utf-8")):
            for line, word in in_text(text):
                yield f"{path.relative_to(ROOT)}:{first + line - 1}: {word}"


def main(argv: list[str]) -> int:
    """Print what there is; return 1 if a page has any, or lib/ has more than CEILING."""
    package = list(in_package())
    if "--lib" in argv:
        print("\n".join(package))
        return 0
    found = list(in_pages())
    for line in found:
        print(f"{line}: name the subject (CONTRIBUTING.md, Prose)", file=sys.stderr)
    if len(package) > CEILING:
        print(
            f"words: {len(package)} banned words in lib/, {CEILING} were there: tests/words.py --lib",
            file=sys.stderr,
        )
    elif len(package) < CEILING:
        print(f"words: lower CEILING in tests/words.py to {len(package)}", file=sys.stderr)
    return 1 if found or len(package) > CEILING else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
