# SPDX-License-Identifier: Apache-2.0
"""Figures in rows, as all tables have them: for the terminal, and for docs/ (page.py)."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

Data = Dict[str, Any]


def number(value: Optional[float]) -> str:
    """Show a number with three digits that mean something."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    digits = f"{value:.3g}"
    return f"{float(digits):,.0f}" if abs(value) >= 100 else digits


def spread(found: Data) -> str:
    return f"{number(found['median'])} ({number(found['spread'][0])} to {number(found['spread'][1])})"


def budget(figure: Data) -> str:
    """Show what is allowed."""
    allowed = figure["budget"]
    return (
        f"{allowed['of']} {allowed['sign'].replace('>=', '≥').replace('<=', '≤')} {number(allowed['limit'])}"
        if allowed
        else ""
    )


def ratio(figure: Data) -> str:
    """Show a ratio and its quartiles; between which ratios the median lies with 95 %, where that is asked."""
    if figure["ratio"] is None:
        return "-"
    around, within = figure["ratio_spread"], figure.get("ratio_interval")
    text = number(figure["ratio"]) + (f" ({number(around[0])} to {number(around[1])})" if around else "")
    return f"{text}; median with 95 %: {number(within[0])} to {number(within[1])}" if within else text


def met(figure: Data) -> str:
    return {True: "yes", False: "**no**", None: ""}[figure["met"]]


def text_table(figures: Sequence[Data]) -> str:
    """Return a plain table of figures."""
    rows = [("figure", "median", "unit", "n", "ratio", "expected", "budget", "met")]
    for f in figures:
        cells = (
            f["name"],
            number(f["median"]),
            f["unit"],
            str(f["n"]),
            ratio(f),
            number(f["expected"]),
            budget(f),
            met(f),
        )
        rows.append(cells)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    # Also in what is set as code, a bar begins a new cell.
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n" for cells in lines)


def by_name(report: Data) -> Dict[str, Data]:
    return {figure["name"]: figure for figure in report["figures"]}


def load(report: Data, name: str) -> str:
    """Say how busy the machine was around a benchmark."""
    run = report["runs"][name]
    return (
        f"Load {number(run['load_before'][0])} before, {number(run['load_after'][0])} after, itself "
        f"included.\n\n"
    )


def lines(figures: Sequence[Data]) -> str:
    """Return a table of figures, a line each."""
    rows = []
    for figure in figures:
        base = figure["baseline"]
        against = f"{base['what']}: {number(base['median'])}" if base else ""
        measured = f"{spread(figure)} {figure['unit']}"
        rows.append(
            [
                figure["what"],
                measured,
                against,
                ratio(figure),
                number(figure["expected"]),
                budget(figure),
                met(figure),
                str(figure["n"]),
            ]
        )
    return table(["what", "measured", "baseline", "ratio", "expected", "budget", "met", "n"], rows) + missed(
        figures
    )


def missed(figures: Sequence[Data]) -> str:
    """Say below a table why budgets are missed, where that is known."""
    known = [figure for figure in figures if figure["met"] is False and figure.get("if_missed")]
    return "".join(f"\nMissed, {figure['what']}: {figure['if_missed']}.\n" for figure in known)


def plain(report: Data, prefix: str) -> str:
    """Every figure whose name begins so, a line each."""
    return load(report, prefix.rstrip("/")) + lines(
        [figure for name, figure in by_name(report).items() if name.startswith(prefix)]
    )
