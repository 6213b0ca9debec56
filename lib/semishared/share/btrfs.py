# SPDX-License-Identifier: Apache-2.0
"""Shares on btrfs: a subvolume, whose qgroup has a limit. Guests cannot make subvolumes: no ioctl crosses virtiofs."""

from __future__ import annotations

import os
import re

from ..errors import NoQuota, ToolFailed
from ..model.shares import Use
from ..tools.run import run
from ..units import human
from . import mounts, rights
from .trees import Directories

ROW = re.compile(r"\s*0/[0-9]+\s+([0-9]+)\s+[0-9]+\s+([0-9]+|none)\s+([0-9]+|none)(\s|\Z)")


class Btrfs(Directories):
    """Subvolumes."""

    def check(self) -> None:
        """Raise StoreUnavailable where it is no btrfs, NoQuota where its quotas are off."""
        mounts.check(self.root, ("btrfs",))
        try:
            _shown(self.root)
        except ToolFailed as e:
            if "quota" not in e.detail:
                raise
            raise NoQuota(f"{self.root} on {os.uname().nodename}: quotas of btrfs are off") from None

    def new(self, path: str) -> None:
        """Make a subvolume."""
        run(["btrfs", "subvolume", "create", "--", path])
        os.chmod(path, 0o700)

    def hold(self, image: int, size: int) -> None:
        """Give the subvolume's qgroup a limit; raise NoQuota if it has not got it."""
        path = self.path(image)
        rights.run(["btrfs", "qgroup", "limit", "--", str(size), path])
        found = self.use(image).limit
        if found != size:
            raise NoQuota(f"{path} on {os.uname().nodename} is held to {human(found)}, not to {human(size)}")

    def resize(self, image: int, size: int) -> None:
        """Give it another."""
        self.hold(image, size)

    def use(self, image: int) -> Use:
        """Return what its qgroup has, and may have."""
        return parse(_shown(self.path(image)))

    def drop(self, image: int, path: str) -> None:
        """Remove the subvolume; its qgroup stays where this kernel keeps one without: its number is never given again."""
        if os.lstat(path).st_ino == 256:
            rights.run(["btrfs", "subvolume", "delete", "--commit-after", "--", path], long=True)
        else:
            super().drop(image, path)


def _shown(path: str) -> str:
    return rights.run(["btrfs", "qgroup", "show", "--raw", "-re", "-F", "--", path])


def parse(text: str) -> Use:
    """Return what `btrfs qgroup show --raw -re -F` says of the one subvolume that it was asked about; raise ToolFailed."""
    for line in text.splitlines():
        row = ROW.match(line)
        if row:
            return Use(int(row.group(1)), -1 if row.group(2) == "none" else int(row.group(2)))
    raise ToolFailed(f"btrfs qgroup show: not understood: {text[-200:]!r}")
