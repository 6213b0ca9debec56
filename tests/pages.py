# SPDX-License-Identifier: Apache-2.0
"""Commands of pages: lines of their blocks, and words between backquotes, that begin with a program.

What stands behind a command in a block, after two spaces or `#`, is said about it and is none of it.
"""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Iterator, List, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FOR_OPERATORS = [
    DOCS / f"{name}.md"
    for name in (
        "explanation/what-if",
        "explanation/what-users-notice",
        "how-to/attention",
        "how-to/before-you-install",
        "how-to/downgrade",
        "how-to/failed-vms",
        "how-to/install-packages",
        "how-to/metrics",
        "how-to/timers",
        "reference/faq",
    )
]
"""Pages of which each command runs in a test."""
TABLE = ROOT / "tests/docs/commands.md"
ROW = re.compile(r"^\| `([^`]+)` \| `([\w/.]+)::(\w+)` \| (.*)\|$", re.MULTILINE)
OPENNEBULA = ("one", "onedatastore", "onehook", "onehost", "oneimage", "onevm")
SYSTEM = ("install", "jq", "journalctl", "make", "promtool", "systemctl", "virsh")
PACKAGES = ("apt", "apt-get", "dnf", "dpkg", "rpm")
PROGRAMS = frozenset(("semishared", "install.sh", "*/2", *OPENNEBULA, *SYSTEM, *PACKAGES))
"""First words of commands; */2 begins a line of cron."""
PROMPT = re.compile(r"^(?:\d+\. as \w+: |\w+@\w+[$#] |\$ )")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`")
ABOUT = re.compile(r"  .*| #.*")
OURS = re.compile(r"(?:^|/)semishared ")
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z0-9]*\b")
BRACKETS = re.compile(r"\[([^]]*)\]")
NUMBER = "7"
"""What a placeholder stands for: a number is an id, and a name."""


class Said(NamedTuple):
    """A command, as a page says it."""

    line: int
    text: str
    in_block: bool
    """Whether a reader may copy it: not only a name in a sentence."""


class Runs(NamedTuple):
    """A row of the table: the test below tests/ in which a command runs."""

    command: str
    file: str
    test: str
    how: str
    """What that test makes of it, or a remark."""


def runs() -> List[Runs]:
    """Return the rows of the table."""
    rows = ROW.findall(TABLE.read_text())
    return [Runs(command, file, test, how.strip()) for command, file, test, how in rows]


def commands(text: str) -> Iterator[Said]:
    """Yield the commands of a page, each as often as it is there."""
    is_fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            words = PROMPT.sub("", line.strip())
            found = ABOUT.sub("", words).strip()
            if is_command(found):
                yield Said(number, found, True)
        else:
            yield from (Said(number, words, False) for words in INLINE.findall(line) if is_command(words))


def is_command(text: str) -> bool:
    """Tell whether it begins with a program; its name alone is no command, nor is what a program prints."""
    first, _, rest = text.partition(" ")
    name = first if first in PROGRAMS else first.rpartition("/")[2]
    # A path, as no name alone, is something to start.
    return name in PROGRAMS and bool(rest[:1].strip("0123456789") or name.endswith(".sh") and "/" in first)


def ours(text: str) -> str:
    """Return the words of a command behind our name, '' if it is none of ours."""
    found = OURS.search(text)
    return text[found.end() :] if found else ""


def ways(text: str) -> Iterator[List[str]]:
    """Yield the words that a line stands for: what is in brackets is there, each of `a|b` once.

    A word in capitals is a placeholder.
    """
    # A redirection, and what a shell does next, is the shell's.
    line = re.split(r" [;&<>] |; | && ", text.replace("...", ""))[0]
    parts = [PLACEHOLDER.sub(NUMBER, part) for part in BRACKETS.split(line)]
    # A group in brackets is one of its alternatives; outside of them `a|b` is within a word.
    groups = [part.split("|") if at % 2 else [part] for at, part in enumerate(parts)]
    for group in itertools.product(*groups):
        yield from map(list, itertools.product(*(word.split("|") for word in shlex.split(" ".join(group)))))
