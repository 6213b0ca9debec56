# SPDX-License-Identifier: Apache-2.0
"""Commands and their output in a page: blocks fenced by ```console, `user@fe$ command` (or #), `> ` more of
it, output.

`<!-- run: OTHER -->` runs the blocks of another page there, in the state that is reached.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, List

PROMPT = re.compile(r"(oneadmin|root)@fe([$#]) (.*)")
RUN = re.compile(r"<!-- run: (\S+) -->")


@dataclass
class Command:
    """A command of a page, and what the page says that it printed."""

    user: str
    prompt: str
    lines: List[str]
    output: List[str]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def render(self) -> List[str]:
        first, *more = self.lines
        return [f"{self.user}@fe{self.prompt} {first}", *(f"> {line}" for line in more), *self.output]


def rewrite(
    page: Path, execute: Callable[[Command], List[str]], changed: Callable[[Path, str], None]
) -> None:
    """Execute all commands of `page` in order, and hand it over with their real output in the place of the
    old.
    """
    lines: List[str] = []
    block: List[Command] | None = None
    for line in page.read_text().splitlines():
        other = RUN.match(line)
        if block is None:
            lines.append(line)
            if line == "```console":
                block = []
            elif other:
                rewrite((page.parent / other.group(1)).resolve(), execute, changed)
            continue
        prompt = PROMPT.match(line)
        if line == "```":
            for command in block:
                command.output = execute(command)
                lines += command.render()
            lines.append(line)
            block = None
        elif prompt:
            block.append(Command(prompt.group(1), prompt.group(2), [prompt.group(3)], []))
        elif line.startswith("> ") and not block[-1].output:
            block[-1].lines.append(line[2:])
        else:
            block[-1].output.append(line)
    assert block is None, f"{page}: a block is not closed"
    changed(page, "\n".join(lines) + "\n")


VARIABLE = (
    (re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "UUID"),
    (re.compile(r"\d{8}-\d{6}"), "DATE"),
    (re.compile(r"\b[0-9a-f]{8}\b"), "HASH"),
    (re.compile(r"\b[0-9a-f]{32,}\b"), "HASH"),
    (re.compile(r"\d+(\.\d+)? ([KMGT]i)?B\b"), "SIZE"),
    (re.compile(r"\b\d+(\.\d+){1,2}\b"), "VERSION"),
    (re.compile(r"\b(bytes|needed =) \d+\b"), "SIZE"),
    (re.compile(r" +"), " "),
)


def comparable(text: str) -> str:
    """Return a page without what differs from run to run: hashes, sizes, versions, dates, the widths of
    columns.
    """
    for pattern, word in VARIABLE:
        text = pattern.sub(word, text)
    return text
