# SPDX-License-Identifier: Apache-2.0
"""Shares on btrfs: a subvolume, whose qgroup has a limit.

Guests cannot make subvolumes: no ioctl crosses virtiofs.

A snapshot is a read-only subvolume beside the share. The limit is on what the share's own subvolume refers
to, so snapshots do not count.

The kernel may stop counting, for the whole file system, where that would be costly (say, when a snapshot is
removed that shares much with the rest): from then on no limit holds. Only a warning of `btrfs qgroup show`
reports it, beside outdated numbers. Then no share is made or resized, and doctor shows the command that
counts again. The administrator runs it: it reads all metadata, and no limit holds meanwhile.
"""

from __future__ import annotations

import os
import re
from datetime import datetime

from ..errors import DataInTheWay, NoQuota, ToolFailed, here
from ..model.share import names as share_names
from ..model.share.share import Use
from ..model.share.steps import ShareSnapshot
from ..tools import files
from ..tools.effects import point
from ..tools.run import run
from ..units import human
from . import rights
from .plain import Directories

ROW = re.compile(r"\s*0/[0-9]+\s+([0-9]+)\s+[0-9]+\s+([0-9]+|none)\s+([0-9]+|none)(\s|\Z)")

UNSURE = re.compile(r"(?m)^WARNING: (.*\bqgroup data\b.*)$")
"""The warning of `btrfs qgroup show` that the kernel does not count, or has not counted everything yet."""
SUBVOLUME = 256
"""BTRFS_FIRST_FREE_OBJECTID."""
PROGRAM = "/usr/local/sbin/semishared-btrfs"
"""Root's copy of as_root.py."""
HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "as_root.py")
MADE = re.compile(r"(?m)^\s+Creation time:\s+([0-9-]{10} [0-9:]{8} [+-][0-9]{4})$")
ALONE = re.compile(r"(?m)^\s+Usage exclusive:\s+([0-9]+)$")


class Btrfs(Directories):
    """Shares as subvolumes."""

    def check(self) -> None:
        """Raise StoreUnavailable if the root is on no btrfs, NoQuota if its quotas are off."""
        rights.check_mounted(self.root, ("btrfs",))
        try:
            _shown(self.root)
        except ToolFailed as e:
            if "quota" not in e.detail:
                raise
            raise NoQuota(f"{here(self.root)}: quotas of btrfs are off") from None

    def lapsed(self) -> tuple[str, str]:
        """Return that the kernel does not count, and the command that mends it."""
        found = UNSURE.search(_shown(self.root))
        if not found:
            return "", ""
        return (
            f"the kernel does not count, so no share is held to its size ({found.group(1)})",
            f"btrfs quota rescan -w {self.root}",
        )

    def _require_count(self) -> None:
        what, mend = self.lapsed()
        if what:
            raise NoQuota(f"{here(self.root)}: {what}; as root there: {mend}")

    def commands(self) -> list[list[str]]:
        """Return the commands that need root, with share 0 as example."""
        tree, kept, gone = self.path(0), self._at(0, "x"), self.gone(0)
        own = [_limit(tree, 1), _qgroups(tree), _delete(gone), _snapshot(tree, kept), _show(kept)]
        return [*super().commands(), *own, _delete(kept)]

    def new(self, path: str) -> None:
        run(["btrfs", "subvolume", "create", "--", path])
        os.chmod(path, 0o700)

    def hold(self, image: int, size: int) -> None:
        """Limit the subvolume's qgroup; raise NoQuota if the limit does not hold."""
        path = self.path(image)
        rights.run(_limit(path, size))
        found = self.use(image).limit
        if found != size:
            raise NoQuota(f"{here(path)} is held to {human(found)}, not to {human(size)}")

    def resize(self, image: int, size: int) -> None:
        self.hold(image, size)

    def use(self, image: int) -> Use:
        """Return bytes and limit of the qgroup; raise NoQuota if the numbers are outdated."""
        said = _shown(self.path(image))
        if UNSURE.search(said):
            self._require_count()
        return parse(said)

    def there(self, image: int) -> str:
        """Return the path of the tree, else of a snapshot that has outlived it, else ''.

        Raise NoQuota if no limit holds.
        """
        kept = (self._at(image, name) for name in self.snapshot_names(image))
        found = super().there(image) or next(kept, "")
        if not found:
            self._require_count()
        return found

    def remove(self, image: int) -> None:
        for name in self.snapshot_names(image):
            self.forget(image, name)
        super().remove(image)

    def _at(self, image: int, name: str) -> str:
        return f"{self.root}/{share_names.snapshot(image, name)}"

    def snapshot(self, image: int, name: str) -> None:
        """Take a snapshot in one transaction of the file system; it is on disk when this returns.

        Raise DataInTheWay if the path exists: btrfs would put the snapshot into that directory, under another
        name.
        """
        path = self._at(image, name)
        if os.path.lexists(path):
            raise DataInTheWay(f"{here(path)} is there, and no snapshot")
        rights.run(_snapshot(self.path(image), path))

    def snapshot_names(self, image: int) -> list[str]:
        """Return the names of the share's snapshots in the root; skip entries that are no subvolumes."""
        named = filter(None, (share_names.snapshot_of(image, entry) for entry in os.listdir(self.root)))
        return sorted(name for name in named if _is_subvolume(self._at(image, name)))

    def known(self, image: int, name: str) -> ShareSnapshot:
        path = self._at(image, name)
        made, alone = parse_snapshot(rights.run(_show(path)))
        return ShareSnapshot(name, made, alone, path, "")

    def forget(self, image: int, name: str) -> None:
        path = self._at(image, name)
        if not files.is_absent(path):
            rights.run(_delete(path), long=True)
            point("snapshot removed")

    def drop(self, image: int, path: str) -> None:
        """Remove the subvolume; some kernels keep its qgroup, whose number is never used again."""
        if _is_subvolume(path):
            rights.run(_delete(path), long=True)
        else:
            super().drop(image, path)


def _is_subvolume(path: str) -> bool:
    """Return True if a path is a subvolume: the top of each has this inode, and no other directory."""
    try:
        return os.lstat(path).st_ino == SUBVOLUME
    except FileNotFoundError:
        return False


def _shown(path: str) -> str:
    return rights.run(_qgroups(path), both=True)


def _qgroups(path: str) -> list[str]:
    return ["btrfs", "qgroup", "show", "--raw", "-re", "-F", "--", path]


def _limit(path: str, size: int) -> list[str]:
    return [*_program(), "limit", str(size), *os.path.split(path)]


def _show(path: str) -> list[str]:
    return ["btrfs", "subvolume", "show", "--raw", "--", path]


def _snapshot(path: str, kept: str) -> list[str]:
    return [*_program(), "snapshot", *os.path.split(path), os.path.basename(kept)]


def _delete(path: str) -> list[str]:
    return [*_program(), "delete", *os.path.split(path)]


def _program() -> list[str]:
    """Return the program for changes that need root: root's copy, or our own if this process is root."""
    return ["/usr/bin/python3", "-IS", HERE] if os.geteuid() == 0 else [PROGRAM]


def parse(text: str) -> Use:
    """Return bytes and limit of the one subvolume in `btrfs qgroup show --raw -re -F`; raise ToolFailed."""
    for line in text.splitlines():
        row = ROW.match(line)
        if row:
            return Use(int(row.group(1)), -1 if row.group(2) == "none" else int(row.group(2)))
    raise ToolFailed(f"btrfs qgroup show: not understood: {text[-200:]!r}")


def parse_snapshot(text: str) -> tuple[int, int]:
    """Return the time of a snapshot, and the bytes that it alone keeps (-1 if quotas are off).

    `text` is from `btrfs subvolume show --raw`. Raise ToolFailed.
    """
    made, alone = MADE.search(text), ALONE.search(text)
    if not made:
        raise ToolFailed(f"btrfs subvolume show: not understood: {text[:200]!r}")
    at = int(datetime.strptime(made.group(1), "%Y-%m-%d %H:%M:%S %z").timestamp())
    return at, int(alone.group(1)) if alone else -1
