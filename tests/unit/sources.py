# SPDX-License-Identifier: Apache-2.0
"""Sources, for tests that judge them: each text is parsed, and its tree walked, once for all tests."""

from __future__ import annotations

import ast
from functools import cache


@cache
def parsed(text: str) -> ast.Module:
    """Return the tree of a module's text, which belongs to all who ask: it is only looked at."""
    return ast.parse(text)


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Return all nodes of that tree, as ast.walk yields them."""
    return tuple(ast.walk(parsed(text)))
