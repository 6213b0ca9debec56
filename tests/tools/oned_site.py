# SPDX-License-Identifier: Apache-2.0
"""The executables of this checkout, forked (lab/forks.py), under a simulated oned: datastores 100 and 101
below a temporary directory.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import pytest

import schemas
from lab import forks, layout
from lab.oned import IMAGE_DS, SYSTEM_DS, ActionFailed, Oned, Settings
from tools.world import make_image

ROOT = Path(__file__).resolve().parents[2]
STORE, SYSTEM = 100, 101
HERE = os.uname().nodename


class ActionSite:
    """A front-end that is its own host."""

    def __init__(self, top: Path, oned: Oned, auth: Path) -> None:
        self.top, self.oned, self.auth = top, oned, auth
        self.location = top / "datastores"
        self.store, self.system = self.location / str(STORE), self.location / str(SYSTEM)

    @classmethod
    @contextmanager
    def up(cls, top: Path) -> Iterator[ActionSite]:
        remotes = top / "fe/var/lib/one/remotes"
        for kind in ("tm", "datastore"):
            (remotes / kind / "semishared").mkdir(parents=True)
            for path in (ROOT / kind).iterdir():
                (remotes / kind / "semishared" / path.name).symlink_to(path)
        (remotes / "lib").symlink_to(ROOT / "lib")
        auth = top / "one_auth"
        auth.write_text("oneadmin:password\n")
        key = top / "semishared_key"
        key.touch(0o600)
        key.write_bytes(layout.FRONT_END_KEY)
        for number in (STORE, SYSTEM):
            (top / "datastores" / str(number)).mkdir(parents=True)
        with Oned.in_tree(top, Settings(location=str(top / "datastores"))) as oned:
            oned.runner.extra["ONE_AUTH"] = str(auth)  # type: ignore[attr-defined]
            oned.runner.through = forks.python()  # type: ignore[attr-defined]
            oned.host_create(HERE)
            site = cls(top, oned, auth)
            oned.datastore_create(f'{IMAGE_DS} SAFE_DIRS="{top}"', STORE)
            oned.datastore_create(SYSTEM_DS, SYSTEM)
            yield site

    @classmethod
    @contextmanager
    def operated(
        cls, top: Path, monkeypatch: pytest.MonkeyPatch, *, has_host: bool = False
    ) -> Iterator[ActionSite]:
        """Yield a site whose oned the test's own process asks, and by its looks as oneadmin.

        oned has no host, unless `has_host`: there is no libvirt on this machine to be asked.
        """
        with cls.up(top) as up:
            assert up.oned.rpc
            if not has_host:
                up.oned.hosts.clear()
            monkeypatch.setenv("ONE_XMLRPC", up.oned.rpc.url)
            monkeypatch.setenv("ONE_AUTH", str(up.auth))
            monkeypatch.setattr(os, "geteuid", lambda: 9869)
            yield up

    def cli(self, *words: str, code: Optional[int] = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run the operator's command."""
        assert self.oned.rpc
        env = {"PATH": os.environ["PATH"], "ONE_XMLRPC": self.oned.rpc.url, "ONE_AUTH": str(self.auth)}
        argv = [*forks.python(), str(ROOT / "bin/semishared"), *words]
        done = subprocess.run(
            argv, input=stdin, env=env, capture_output=True, text=True, check=False, timeout=60
        )
        assert code is None or done.returncode == code, (done.returncode, done.stdout, done.stderr)
        schemas.check(argv, done.stdout.encode())
        return done

    # -- images -------------------------------------------------------------------------------------

    def image(
        self, name: str = "image", format: str = "raw", persistent: bool = False, **attributes: str
    ) -> int:
        """Upload an image of 8 MiB; return its id."""
        path = self.top / f"{name}.img"
        make_image(path, format, 8 << 20, "write -P 0xa1 1M 64k")
        more: Dict[str, Any] = dict(attributes)
        return self.oned.image_create(STORE, name, path=str(path), persistent=persistent, attributes=more)

    def source(self, image: int) -> Path:
        return Path(self.oned.image(image).source)

    # -- VMs ----------------------------------------------------------------------------------------

    def vm(self, *images: int) -> int:
        """Make a VM with a disk of each image, not deployed yet."""
        return self.oned.vm_create({"NAME": "vm", "DISK": [{"IMAGE_ID": str(image)} for image in images]})

    def disk(self, vm: int, number: int = 0) -> Path:
        return self.system / str(vm) / f"disk.{number}"

    def tm(self, action: str, *words: object, stdin: Optional[str] = None) -> None:
        """Run a transfer action; raise ActionFailed with what the user would read."""
        self.oned.drivers.tm([action.upper(), "semishared", *(str(word) for word in words)], stdin)

    def make(self, action: str, vm: int, number: int = 0) -> Path:
        """Run clone or ln for a disk of a VM."""
        image = self.oned.image(int(self.oned.vm(vm).disks[number]["IMAGE_ID"]))
        self.tm(action, f"fe:{image.source}", f"{HERE}:{self.disk(vm, number)}", vm, STORE)
        return self.disk(vm, number)

    def refused(self, error: str, work: Any, *words: Any) -> str:
        """Return the line with which `work` was refused; `error` is its id."""
        try:
            work(*words)
        except ActionFailed as e:
            assert str(e).startswith(f"{error} "), str(e)
            return str(e)
        raise AssertionError(f"not refused: {words}")

    def warnings(self) -> List[str]:
        """Return the warnings of the last action."""
        return [line for line in self.oned.calls[-1].stderr.splitlines() if line.startswith("WARN: ")]
