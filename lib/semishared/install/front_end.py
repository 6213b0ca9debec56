# SPDX-License-Identifier: Apache-2.0
"""The front-end of an installation: where its parts are, their owner, its version."""

from __future__ import annotations

import os
import pwd
import re
import stat
from typing import Callable, Mapping, Optional

from ..errors import CannotInstall
from ..named import NamedTuple
from .preflight import user

ONEADMIN = "oneadmin"
OLDEST, NEWEST = (6, 10), (7, 4)
"""OpenNebula versions whose calls are known (docs/explanation/contract.md)."""
FULL = (7, 0)
"""The first version with all features; for older ones `warnings` says what is missing."""


class FrontEnd(NamedTuple):
    """Where OpenNebula's parts lie; absolute paths."""

    remotes: str
    etc: Optional[str]
    """Directory of oned.conf; None: no configuration is edited."""
    self_contained: bool

    @property
    def oned_conf(self) -> str:
        return f"{self.etc}/oned.conf"

    @property
    def execrc(self) -> str:
        return f"{self.etc}/vmm_exec/vmm_execrc"

    @property
    def owner(self) -> tuple[int, int]:
        """User and group of all files: those of the remotes directory; if that is root's, oneadmin's."""
        status = os.stat(self.remotes)
        if status.st_uid:
            return status.st_uid, status.st_gid
        try:
            oneadmin = pwd.getpwnam(ONEADMIN)
        except KeyError:
            return 0, 0
        return oneadmin.pw_uid, oneadmin.pw_gid

    def version(self) -> tuple[int, ...]:
        """Return OpenNebula's version, () if it is unknown."""
        try:
            with open(f"{self.remotes}/VERSION", encoding="utf-8") as file:
                match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", file.read(100).strip())
        except OSError:
            return ()
        return tuple(int(part) for part in match.groups() if part) if match else ()


def locate(
    remotes: Optional[str], etc: Optional[str], root: str, with_config: bool, environment: Mapping[str, str]
) -> FrontEnd:
    """Return OpenNebula's places by options, ONE_LOCATION, or the packages'; raise CannotInstall."""
    one_location = environment.get("ONE_LOCATION", "").strip("'").rstrip("/")
    root = os.path.abspath(root) if root else ""
    is_named = remotes is not None
    if remotes is None:
        remotes = f"{root}{one_location}/var/remotes" if one_location else f"{root}/var/lib/one/remotes"
    remotes = os.path.abspath(remotes)
    if not _is_there(remotes, stat.S_ISDIR):
        raise CannotInstall(f"{remotes} is not a directory: is OpenNebula installed here? (--remotes DIR)")
    if not _is_there(f"{remotes}/vmm/kvm/deploy", stat.S_ISREG):
        raise CannotInstall(f"{remotes} is not a remotes directory of OpenNebula: it has no vmm/kvm/deploy")
    packaged = remotes.endswith("/var/lib/one/remotes")
    self_contained = not packaged and remotes.endswith("/var/remotes")
    if not with_config:
        return FrontEnd(remotes, None, self_contained)
    if etc is None and packaged:
        etc = f"{remotes[: -len('/var/lib/one/remotes')]}/etc/one"
    elif etc is None and self_contained:
        etc = f"{remotes[: -len('/var/remotes')]}/etc"
    elif etc is not None:
        etc = os.path.abspath(etc)
        is_named = False
    if etc is None or not _is_there(f"{etc}/oned.conf", stat.S_ISREG):
        if not is_named:
            raise CannotInstall(
                f"there is no {etc}/oned.conf: where is it? (--etc DIR; --no-config edits none)"
            )
        etc = None
    return FrontEnd(remotes, etc, self_contained)


def _is_there(path: str, kind: Callable[[int], bool]) -> bool:
    """Tell whether a file of a kind is at `path`; raise CannotInstall if this user may not look."""
    try:
        return kind(os.stat(path).st_mode)
    except PermissionError:
        closed = os.path.dirname(path)
        while not os.access(os.path.dirname(closed), os.X_OK):
            closed = os.path.dirname(closed)
        raise CannotInstall(
            f"{path}: permission denied: {user()} may not search {closed}: run this as root"
        ) from None
    except OSError:
        return False


LIMITS = (
    "a user's message is the first 100 characters of what a driver writes, its log lines among them",
    "what a transfer action says when it succeeds is in no log: `semishared status` and gc say what was kept",
    "no images that are directories, and no live migration to another datastore",
    "a VM with a raw disk and MODE = INCREMENT is backed up in full without a word",
    "snapshots of persistent images are kept whatever PERSISTENT_SNAPSHOTS says",
    "of what a host's probes say of its room, that of the probe counts which the directory lists last",
)
"""What is otherwise before FULL, a line each (docs/reference/support.md has them too)."""
LIMITS_PAGE = "docs/reference/support.md, OpenNebula 6.10"


def check_version(version: tuple[int, ...]) -> list[str]:
    """Return the warnings for a version; raise CannotInstall for an OpenNebula that is too old."""
    text = ".".join(map(str, version))
    if not version:
        return [f"the version of OpenNebula is unknown (no remotes/VERSION); {_range()} are supported"]
    if version[:2] < OLDEST:
        raise CannotInstall(
            f"OpenNebula {text} is too old: before {OLDEST[0]}.{OLDEST[1]} oned calls drivers "
            f"that semishared does not have "
            f"(vCenter and docker images among them) and was never tried; {_range()} are supported"
        )
    if version[:2] < FULL:
        return [f"OpenNebula {text}: {limit}" for limit in (*LIMITS, f"more: {LIMITS_PAGE}")]
    if version[:2] > NEWEST:
        return [
            f"OpenNebula {text} is newer than what was tried ({_range()}): look at `semishared "
            f"doctor` afterwards"
        ]
    return []


def _range() -> str:
    return f"{FULL[0]}.{FULL[1]} to {NEWEST[0]}.{NEWEST[1]}, and with limits {OLDEST[0]}.{OLDEST[1]},"


def check_rights(place: FrontEnd, targets: list[str]) -> None:
    """Raise CannotInstall if this user may not write in each of the directories `targets`."""
    for target in targets:
        if not os.access(target, os.W_OK | os.X_OK):
            flags = os.statvfs(target).f_flag
            if flags & os.ST_RDONLY:
                raise CannotInstall(f"{target} lies on a file system that is mounted read-only")
            who = "the user of OpenNebula" if place.self_contained else "root"
            if target.startswith(place.remotes):
                who = "root or oneadmin"
            raise CannotInstall(f"{target} is not writable for {user()}: run this as {who}")
