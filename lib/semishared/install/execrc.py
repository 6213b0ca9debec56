# SPDX-License-Identifier: Apache-2.0
"""What vmm_execrc must say, without which disks of running VMs have no snapshots: text in, text out."""

from __future__ import annotations

import re
from typing import Optional, Sequence

from .. import NAME as DRIVER
from ..errors import BadConfiguration
from .configuration import BEGIN, BLOCK, END, Changed
from .oned_conf import Edit, apply

LIVE = "LIVE_DISK_SNAPSHOTS"
ASSIGNMENT = re.compile(
    rf"""^[ \t]*(?:export[ \t]+)?{LIVE}="""
    r"""(?P<value>"(?:[^"\\]|\\.)*"|'[^']*'|[^\s"'#;&|$`]*)(?P<rest>[^\n]*)""",
    re.MULTILINE | re.DOTALL,
)


def configure(text: str, names: Sequence[str], path: str = "vmm_execrc") -> Changed:
    """Return vmm_execrc with NAME-semishared in its list of live disk snapshots for each VM_MAD of
    `names`.
    """
    wanted = [f"{name}-{DRIVER}" for name in names]
    match = _assignment(text, path)
    if match is None:
        return Changed(
            f'{text}\n{BEGIN}\n{LIVE}="{" ".join(wanted)}"\n{END}\n', (f"{LIVE}: {' '.join(wanted)}",)
        )
    value, quote = _unquoted(match.group("value"))
    missing = [word for word in wanted if word not in value.split()]
    if not missing:
        return Changed(text, ())
    new = f"{value} {' '.join(missing)}" if value else " ".join(missing)
    edit = Edit(match.start("value"), match.end("value"), f"{quote}{new}{quote}")
    return Changed(apply(text, [edit]), (f"{LIVE}: {' '.join(missing)}",))


def unconfigure(text: str, path: str = "vmm_execrc") -> Changed:
    """Return vmm_execrc without anything of semishared."""
    without = BLOCK.sub("", text)
    match = _assignment(without, path)
    if match is not None:
        value, quote = _unquoted(match.group("value"))
        words = re.findall(r"(\s*)(\S+)", value)
        end = value[len(value.rstrip()) :]
        # One blank came with each word.
        new = (
            "".join(blank + word if not word.endswith(f"-{DRIVER}") else blank[:-1] for blank, word in words)
            + end
        )
        edit = Edit(match.start("value"), match.end("value"), f"{quote}{new}{quote}")
        without = apply(without, [edit]) if new != value else without
    return Changed(without, (f"{LIVE}: {DRIVER} out",) if without != text else ())


def _assignment(text: str, path: str) -> Optional[re.Match[str]]:
    """Return the last assignment of the list, which is the one in force; raise BadConfiguration if it cannot
    be edited.
    """
    found = None
    for match in ASSIGNMENT.finditer(text):
        rest = match.group("rest").strip()
        if (rest and not rest.startswith("#")) or "\\" in match.group("value") or "$" in match.group("value"):
            line = text.count("\n", 0, match.start()) + 1
            raise BadConfiguration(f"{path} line {line}: {LIVE} is no plain list in quotes")
        found = match
    return found


def _unquoted(value: str) -> tuple[str, str]:
    """Return the text of a shell value, and the quotes it needs with blanks in it."""
    return (value[1:-1], value[0]) if value[:1] in ('"', "'") and value else (value, '"')
