# SPDX-License-Identifier: Apache-2.0
"""Which faults can be put into a module: each a place in its text and what stands there instead. Pure.

Only that place changes and no line moves, so that a linter among the tests finds nothing but the fault.
"""

from __future__ import annotations

import ast
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple, Type


class Mutant(NamedTuple):
    """One fault: bytes `begin` to `end` of a file are `text`."""

    path: str
    line: int
    statement: int
    """The first line of the statement that it is in."""
    what: str
    begin: int
    end: int
    text: str


COMPARED: Dict[Type[ast.cmpop], List[Type[ast.cmpop]]] = {
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
COMPUTED: Dict[Type[ast.operator], Type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
Change = Tuple[str, ast.AST, str]
"""What it is called, the node that is replaced, and by what."""


def changes(node: ast.AST) -> List[Change]:
    """Return the mutations that begin with a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        before = type(node.ops[0])
        return [
            (
                f"{before.__name__} is {other.__name__}",
                node,
                ast.unparse(ast.Compare(node.left, [other()], node.comparators)),
            )
            for other in COMPARED[before]
        ]
    if isinstance(node, ast.BoolOp):
        swapped: ast.boolop = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return [
            (
                f"{type(node.op).__name__} is {type(swapped).__name__}",
                node,
                ast.unparse(ast.BoolOp(swapped, node.values)),
            )
        ]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [("without not", node, ast.unparse(node.operand))]
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in COMPUTED and not _joins_text(node):
        other = COMPUTED[type(node.op)]
        made = (
            ast.BinOp(node.left, other(), node.right)
            if isinstance(node, ast.BinOp)
            else ast.AugAssign(node.target, other(), node.value)
        )
        return [(f"{type(node.op).__name__} is {other.__name__}", node, ast.unparse(made))]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return [(f"{node.value} is {not node.value}", node, str(not node.value))]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return [(f"{node.value} is {node.value + 1}", node, str(node.value + 1))]
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return [("the condition is its opposite", node.test, f"not ({ast.unparse(node.test)})")]
    if (
        isinstance(node, ast.Return)
        and node.value is not None
        and not (isinstance(node.value, ast.Constant) and node.value.value is None)
    ):
        return [("returns None", node.value, "None")]
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return [("raises nothing" if isinstance(node, ast.Raise) else "the call is left out", node, "pass")]
    if isinstance(node, (ast.Break, ast.Continue)):
        word = "continue" if isinstance(node, ast.Break) else "break"
        return [(f"{type(node).__name__.lower()} is {word}", node, word)]
    return []


def _joins_text(node: ast.AST) -> bool:
    """Tell whether `+` or `%` is of strings or lists here, where another operator would only raise."""
    parts = list(ast.walk(node))
    is_text = any(isinstance(part, ast.Constant) and isinstance(part.value, (str, bytes)) for part in parts)
    return is_text or any(isinstance(part, (ast.JoinedStr, ast.List, ast.Tuple)) for part in parts)


def _left_out(tree: ast.Module) -> set[int]:
    """Return the ids of nodes that no test can judge: annotations, what only type checkers read, what has no
    place of its own.
    """
    found: set[int] = set()

    def skip(node: Optional[ast.AST]) -> None:
        if node is not None:
            found.update(id(part) for part in ast.walk(node))

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            skip(node.returns)
            for argument in (
                *node.args.posonlyargs,
                *node.args.args,
                *node.args.kwonlyargs,
                node.args.vararg,
                node.args.kwarg,
            ):
                skip(argument.annotation if argument else None)
        elif isinstance(node, ast.AnnAssign):
            skip(node.annotation)
        elif isinstance(node, ast.JoinedStr):  # before Python 3.12 what is within says that it is elsewhere
            skip(node)
    return found


def mutants(path: str, source: str) -> Iterator[Mutant]:
    """Yield all mutants within the functions of a module: what is outside of them runs whenever it is loaded,
    and is mostly words.
    """
    tree = ast.parse(source)
    left_out = _left_out(tree)
    within = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for stmt in node.body
        for part in ast.walk(stmt)
    }
    begins: Dict[int, int] = {}
    for statement in ast.walk(tree):  # from the outside to the inside
        if isinstance(statement, ast.stmt):
            begins.update({id(part): statement.lineno for part in ast.walk(statement)})
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(tree):
        if id(node) not in within or id(node) in left_out:
            continue
        for what, place, text in changes(node):
            assert (
                isinstance(place, (ast.expr, ast.stmt))
                and place.end_lineno
                and place.end_col_offset is not None
            )
            lines = "\n" * (place.end_lineno - place.lineno)
            text = f"({text}{lines})" if isinstance(place, ast.expr) else f"{text}{lines}"
            begin, end = (
                starts[place.lineno - 1] + place.col_offset,
                starts[place.end_lineno - 1] + place.end_col_offset,
            )
            yield Mutant(path, place.lineno, begins[id(place)], what, begin, end, text)


def apply(mutant: Mutant, source: str) -> str:
    """Return the module's text with the mutant in it."""
    data = source.encode()
    return (data[: mutant.begin] + mutant.text.encode() + data[mutant.end :]).decode()
