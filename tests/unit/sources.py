# SPDX-License-Identifier: Apache-2.0
"""Sources, for tests that judge them: each text is parsed, and its tree walked, once for all tests."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "lib/semishared"


@cache
def parsed(text: str) -> ast.Module:
    """Return the tree of a module's text, which belongs to all who ask: it is only looked at."""
    return _package().get(text) or ast.parse(text)


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Return all nodes of that tree, as ast.walk yields them."""
    return tuple(ast.walk(parsed(text)))


@cache
def _package() -> dict[str, ast.Module]:
    """Return the tree of each module of the package, by its text.

    They stay to the end, so nothing is to be found in them by a search for what nobody holds any more, which
    would take as long as all else here.
    """
    gc.collect()
    gc.disable()
    found = {text: ast.parse(text) for text in (path.read_text() for path in PACKAGE.rglob("*.py"))}
    gc.freeze()
    gc.enable()
    return found
