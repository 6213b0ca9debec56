# SPDX-License-Identifier: Apache-2.0
"""A front-end that is its own bridge, with a datastore of shares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lab import forks
from semishared.config import Config
from semishared.model.share.share import Tree
from semishared.model.steps import Step, to_data
from semishared.named import to_data as to_data_of
from semishared.wire import session
from tools.oned_site import ActionSite

SHARES = 110
MiB = 1 << 20


def template(fs: str, root: Path, **more: str) -> str:
    """Return the template of a datastore of shares."""
    values = {
        "NAME": "shares",
        "DS_MAD": "semishared",
        "TM_MAD": "semishared",
        "TYPE": "IMAGE_DS",
        "DISK_TYPE": "FILESYSTEM",
        "SEMISHARED_FS": fs,
        "SEMISHARED_FS_ROOT": str(root),
        **more,
    }
    return " ".join(f'{name}="{value}"' for name, value in values.items())


class Shares:
    """Datastore SHARES of a site, whose root was made one."""

    def __init__(self, site: ActionSite, fs: str, root: Path, **more: str) -> None:
        self.site, self.oned, self.root = site, site.oned, root
        self.oned.datastore_create(template(fs, root, **more), SHARES)
        site.cli("share", "init", str(SHARES))

    def image(self, name: str, path: str) -> int:
        """Make a share as `oneimage create --type FILESYSTEM --path` does."""
        return self.oned.image_create(SHARES, name, path=path, type="FILESYSTEM")

    def tree(self, image: int) -> Path:
        """Return where a share is."""
        return Path(self.oned.image(image).source)

    def known(self) -> Tree:
        """Return what steps are told of the root."""
        names = ("SEMISHARED_FS", "SEMISHARED_STORE", "SEMISHARED_CLOUD")
        fs, marker, cloud = (str(self.oned.datastores[SHARES].template[name]) for name in names)
        return Tree(fs, str(self.root), marker, cloud=cloud)

    def listed(self) -> dict[int, dict[str, Any]]:
        """Return what `semishared share list` says, by image."""
        found = json.loads(self.site.cli("share", "list", "--json").stdout)["shares"]
        return {row["image"]: row for row in found}


def fill(path: Path, mib: int = 256) -> tuple[int, str]:
    """Write a file until there is no room; return the bytes that went in, and the error."""
    size, said = 0, ""
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(mib):
                file.write(os.urandom(MiB))
            os.fsync(file.fileno())
    except OSError as e:
        said = os.strerror(e.errno or 0)
    size = path.stat().st_size
    return size, said


class Killed:
    """Steps on shares, through the host side of this machine, in a process that may be killed at a point."""

    def __init__(self, top: Path) -> None:
        self.job, self.trace = top / "job", top / "trace"

    def run(self, step: Step, at: int = 0) -> int:
        """Carry out a step; return the exit code."""
        self.job.write_text(json.dumps(to_data(step)))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        env.update({"SEMISHARED_KILL_AT": str(at)} if at else {"SEMISHARED_TRACE": str(self.trace)})
        return subprocess.run(
            [*forks.words("shares.once"), str(self.job)], env=env, check=False, timeout=120
        ).returncode


def on(*steps: Step) -> list[Any]:
    """Carry out steps through the host side of this machine, which is forked."""
    with (
        patch.object(session, "PYTHON", forks.python()[0]),
        session.Session("localhost", "test", Config()) as to,
    ):
        return [to_data_of(one) for one in to.run(steps)]
