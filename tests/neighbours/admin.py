# SPDX-License-Identifier: Apache-2.0
"""An administrator who does what a page of docs/how-to says, command by command, on a simulated oned.

The commands of a section are its indented lines; what follows three spaces explains. The simulated oned
carries out OpenNebula's commands, ours and the shell's are run; one that is neither fails the test.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Callable, Dict, List

from lab.oned.objects import Datastore
from lab.oned.template import parse
from tools.oned_site import ROOT, ActionSite

HOW_TO = ROOT / "docs/how-to"
LOCATION = "/var/lib/one/datastores"


def commands(page: str, section: str) -> List[str]:
    """Return the commands of a section of a page."""
    text = (HOW_TO / page).read_text()
    found = re.search(rf"(?ms)^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text)
    assert found, f"{page} has no section {section!r}"
    lines = re.findall(r"(?m)^    (\S.*)$", found.group(1))
    return [line.split("   ")[0].rstrip() for line in lines]


class Admin:
    """A shell on the front-end of a site."""

    def __init__(self, site: ActionSite) -> None:
        self.site, self.oned, self.said = site, site.oned, ""
        self.scratch = site.top / "scratch"
        self.scratch.mkdir()
        self.known: Dict[str, Callable[[List[str]], str]] = {
            "onedatastore update": self.datastore_update,
            "onedatastore show": lambda words: self.datastore(words[0]).to_xml(),
            "oneimage show": lambda words: str(self.oned.image(self.image(words[0])).source),
            "oneimage create": self.image_create,
            "oneimage clone": self.image_clone,
            "oneimage persistent": self.image_persistent,
            "oneimage snapshot-delete": lambda words: self.snapshot("snap_delete", words),
            "oneimage snapshot-flatten": lambda words: self.snapshot("snap_flatten", words),
        }

    def follow(self, lines: List[str], **names: object) -> None:
        """Carry out commands, with `names` in the place of the page's words in capitals."""
        for line in lines:
            for name, value in names.items():
                line = re.sub(rf"\b{name}\b", str(value), line)
            self.do(line.replace(LOCATION, str(self.site.location)).replace("/var/tmp", str(self.scratch)))

    def do(self, line: str) -> None:
        words = shlex.split(line.partition(" | ")[0])
        if words[0] == "semishared":
            self.said = self.site.cli(*words[1:]).stdout
        elif words[0] in ("printf", "rm"):
            subprocess.run(["bash", "-ec", line], check=True)
        else:
            self.said = self.known[" ".join(words[:2])](words[2:])

    # -- OpenNebula's commands ----------------------------------------------------------------------

    def datastore(self, name: str) -> Datastore:
        return next(one for one in self.oned.datastores.values() if name in (one.name, str(one.id)))

    def image(self, name: str) -> int:
        return next(one.id for one in self.oned.images.values() if name in (one.name, str(one.id)))

    def datastore_update(self, words: List[str]) -> str:
        append, name, file = words
        assert append == "--append", "without it the template is replaced"
        self.oned.datastore_update(self.datastore(name).id, parse(Path(file).read_text()))
        return ""

    def image_create(self, words: List[str]) -> str:
        assert words[0] == "-d" and words[2::2] == ["--name", "--type", "--path"]
        _, store, _, name, _, kind, _, path = words
        return str(self.oned.image_create(self.datastore(store).id, name, path=path, type=kind))

    def image_clone(self, words: List[str]) -> str:
        image, name, option, store = words
        assert option == "-d"
        return str(self.oned.image_clone(self.image(image), name, self.datastore(store).id))

    def image_persistent(self, words: List[str]) -> str:
        self.oned.image_persistent(self.image(words[0]), True)
        return ""

    def snapshot(self, action: str, words: List[str]) -> str:
        self.oned.image_snapshot(self.image(words[0]), action, int(words[1]))
        return ""
