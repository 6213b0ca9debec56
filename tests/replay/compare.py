# SPDX-License-Identifier: Apache-2.0
"""Compare recorded and generated texts field by field, with machine-made values mapped both ways."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from typing import Dict, List
from xml.etree import ElementTree

# Left out of the comparison; every entry says why.
EXCLUDED: Dict[str, str] = {
    "VM/MONITORING": "written by the host probes whenever they report, at no fixed moment",
    "VM/LAST_POLL": "time of the last probe report, see MONITORING",
}
# Compared only as zero or not zero; every entry says why.
MEASURED: Dict[str, str] = {
    "DATASTORE/TOTAL_MB": "capacity of the recording machine's disk, the recorder answers its own",
    "DATASTORE/FREE_MB": "see TOTAL_MB",
    "DATASTORE/USED_MB": "see TOTAL_MB",
    "HISTORY/REQUEST_ID": "random number of the API request",
}
# Calls that a recording may lack altogether; every entry says why.
UNRECORDED: Dict[str, str] = {
    "datastore/monitor": "oned asks for it after cp, mkfs and rm (01); most recordings were made without "
    "these calls",
}
_TOKENS = re.compile(
    r"(?P<uuid>(?<![0-9a-f])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![0-9a-f]))"
    r"|(?P<hash>(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f]))"
    r"|(?P<time>\b1[0-9]{9}\b|\b[A-Z][a-z]{2} [A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8} 20[0-9]{2}\b)"
)


@dataclass
class Bijection:
    """Recorded values against generated ones: each stands for exactly one other, in both directions."""

    forward: Dict[str, str] = field(default_factory=dict)
    backward: Dict[str, str] = field(default_factory=dict)

    def agree(self, recorded: str, generated: str) -> bool:
        """Bind two values, or tell whether they are bound to each other."""
        if recorded in self.forward or generated in self.backward:
            return self.forward.get(recorded) == generated and self.backward.get(generated) == recorded
        self.forward[recorded] = generated
        self.backward[generated] = recorded
        return True

    def same(self, recorded: str, generated: str) -> bool:
        """Compare texts: tokens by the mapping, moments as moments, everything else literally."""
        if recorded == generated and not _TOKENS.search(recorded):
            return True
        left, right = list(_TOKENS.finditer(recorded)), list(_TOKENS.finditer(generated))
        if [m.lastgroup for m in left] != [m.lastgroup for m in right]:
            return False
        if _TOKENS.sub("\0", recorded) != _TOKENS.sub("\0", generated):
            return False
        return all(
            one.lastgroup == "time" or self.agree(one.group(), other.group())
            for one, other in zip(left, right)
        )


def flatten(text: str) -> Dict[str, str]:
    """Turn XML into path -> text in document order; other text into numbered lines."""
    stripped = text.strip()
    if not stripped.startswith("<") or stripped.startswith("<domain"):
        # Domain XML is compared line by line: its driver may treat it as text.
        return {f"line {number}": line for number, line in enumerate(text.rstrip("\n").split("\n"), 1)}
    result: Dict[str, str] = {}
    _walk(ElementTree.fromstring(stripped), "", result)
    return result


def decode(text: str) -> str:
    """Decode what a driver gets as base64."""
    return base64.b64decode(text).decode()


def _walk(element: ElementTree.Element, path: str, result: Dict[str, str]) -> None:
    path = f"{path}/{element.tag}" if path else element.tag
    tail = "/".join(re.sub(r"\[\d+\]", "", path).split("/")[-2:])
    if tail in EXCLUDED:
        return
    if tail in MEASURED:
        result[path] = element.text if element.text in ("0", "-1") else "measured"
        return
    if not len(element):
        result[path] = element.text or ""
        return
    counts: Dict[str, int] = {}
    repeated = {child.tag for child in element if len(element.findall(child.tag)) > 1}
    for child in element:
        counts[child.tag] = counts.get(child.tag, 0) + 1
        before = child.tag
        if child.tag in repeated:
            child.tag = f"{child.tag}[{counts[child.tag]}]"
        _walk(child, path, result)
        child.tag = before


def differences(where: str, recorded: str, generated: str, mapping: Bijection) -> List[str]:
    """List what differs between two texts, one readable line each."""
    left, right = flatten(recorded), flatten(generated)
    found = []
    for key in [*left, *(key for key in right if key not in left)]:
        if key not in right:
            found.append(f"{where}: {key} recorded {left[key]!r}, not generated")
        elif key not in left:
            found.append(f"{where}: {key} generated {right[key]!r}, not recorded")
        elif not mapping.same(left[key], right[key]):
            found.append(f"{where}: {key} recorded {left[key]!r}, generated {right[key]!r}")
    if not found and list(left) != list(right):
        moved = next((a, b) for a, b in zip(left, right) if a != b)
        found.append(f"{where}: order differs, recorded {moved[0]}, generated {moved[1]}")
    return found
