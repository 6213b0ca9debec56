# SPDX-License-Identifier: Apache-2.0
"""Manual pages, and what completes the operator's command in bash, zsh and fish: for the whole system.

They are in the checkout as they are installed (share/, which `make docs` writes), go to /usr/local/share, and
leave with the rest. Nothing of ours needs them: where that directory cannot be written to, as by oneadmin,
they are left out.
"""

from __future__ import annotations

import os
from typing import Dict, List, Optional, Tuple

from .. import NAME
from ..named import NamedTuple
from ..tools import files
from ..tools.effects import point
from .front_end import FrontEnd
from .tree import Say

SHARE = "/usr/local/share"
FOLDERS = ("man/man1", "bash-completion/completions", "zsh/site-functions", "fish/vendor_completions.d")
"""Where the system's programs look, below share/."""


class Manuals(NamedTuple):
    """Files of ours below `share`, '' where there is no such directory to write to."""

    share: str
    contents: Dict[str, bytes]
    """Files to write, by their paths below it."""
    gone: Tuple[str, ...]
    """Files to remove: of an older version, or all."""

    def carry_out(self, say: Say, dry: bool) -> None:
        """Write and remove files where they differ; `say` each folder of them, changed or (`dry`) to be."""
        for folder in FOLDERS:
            target = f"{self.share}/{folder}"
            new = [name for name in self.contents if os.path.dirname(name) == folder]
            new = [name for name in new if _content(f"{self.share}/{name}") != self.contents[name]]
            old = [name for name in self.gone if os.path.dirname(name) == folder]
            if new:
                say(f"make {len(new)} files of {NAME} in {target}")
            if old:
                say(f"remove {len(old)} files of {NAME} from {target}")
            if dry:
                continue
            if new:
                os.makedirs(target, exist_ok=True)
            for name in new:
                files.write(f"{self.share}/{name}", self.contents[name])
            for name in old:
                files.unlink(f"{self.share}/{name}")
                point(f"removed {name}")
            if old and not new:
                _remove_empty(self.share, folder)


def look(place: FrontEnd, checkout: str, root: str, uninstall: bool) -> Manuals:
    """Return the wanted changes; none but for OpenNebula as packages install it, where the system's are."""
    root = os.path.abspath(root) if root else ""
    share = f"{root}{SHARE}"
    is_systems = place.remotes == f"{root}/var/lib/one/remotes"
    if not is_systems or not os.path.isdir(share) or not os.access(share, os.W_OK | os.X_OK):
        return Manuals("", {}, ())
    wanted: Dict[str, bytes] = {}
    for name in [] if uninstall else _ours(f"{checkout}/share"):
        with open(f"{checkout}/share/{name}", "rb") as file:
            wanted[name] = file.read()
    return Manuals(share, wanted, tuple(name for name in _ours(share) if name not in wanted))


def _ours(share: str) -> List[str]:
    """Return the files of ours in the folders below a share/, by their paths below it."""
    found = []
    for folder in FOLDERS:
        try:
            names = os.listdir(f"{share}/{folder}")
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name in names:
            if name.lstrip("_").split(".")[0].split("-")[0] == NAME:
                found.append(f"{folder}/{name}")
    return sorted(found)


def _content(path: str) -> Optional[bytes]:
    """Return what is installed, None if it cannot be read: then it is written again."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def _remove_empty(share: str, folder: str) -> None:
    """Remove a folder below share/, and those above it, as long as they are empty."""
    while folder:
        try:
            os.rmdir(f"{share}/{folder}")
        except OSError:
            return  # not empty, or a link of the distribution's
        folder = os.path.dirname(folder)
