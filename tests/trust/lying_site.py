# SPDX-License-Identifier: Apache-2.0
"""A front-end with two hosts, of which one lies, and what belongs to others: that is as it was, whatever has
been answered.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from lab import forks
from lab.oned.objects import Datastore, History, Image, Vm
from tools.oned_site import STORE, SYSTEM, ActionSite
from tools.world import make_image
from trust.verb import AS

LIAR, HONEST = "liar", "honest"
OTHERS = 200
"""A datastore of another tenant."""
SECRET = b"what belongs to somebody else"


class LyingSite(ActionSite):
    """Machines with directories of their own, and the stand-in for ssh that leads to them."""

    location: Path

    @classmethod
    @contextmanager
    def with_hosts(cls, top: Path) -> Iterator[LyingSite]:
        with cls.up(top) as site:
            assert isinstance(site, LyingSite)
            site._furnish()
            yield site

    def _furnish(self) -> None:
        self.home, self.bin = self.top / "fe/var/lib/one", self.top / "bin"
        for folder in (
            self.bin,
            self.home / ".ssh",
            self.home / ".one",
            self.location / str(OTHERS),
            self.location / "103",
        ):
            folder.mkdir(parents=True, exist_ok=True)
        (self.location / ".semishared").mkdir(exist_ok=True)
        for host in (LIAR, HONEST):
            for name in ("101", "103", ".semishared"):
                (self.top / "hosts" / host / name).mkdir(parents=True)
        ssh = self.bin / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {" ".join(forks.words("trust.lying_host"))} {self.top} "$@"\n')
        ssh.chmod(0o755)
        path = f"{self.bin}:{os.environ['PATH']}"
        self.environment = {
            "PATH": path,
            "HOME": str(self.home),
            "ONE_AUTH": str(self.auth),
            "ONE_XMLRPC": self.oned.rpc.url,  # type: ignore[union-attr]
        }
        self.oned.runner.extra.update(self.environment)  # type: ignore[attr-defined]
        self.oned.hosts.clear()
        for host in (LIAR, HONEST):
            self.oned.host_create(host)
        # What doctor takes for an OpenNebula.
        for name in (
            "var/lib/one/remotes/vmm/kvm/deploy",
            "etc/one/oned.conf",
            "var/lib/one/remotes/etc/vmm/kvm/kvmrc",
        ):
            file = self.top / "fe" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("")
        self._others()

    def _others(self) -> None:
        """Lay out what no disk of the VM is."""
        os.chown(self.top / "semishared_key", AS, -1)
        (self.home / ".ssh/authorized_keys").write_bytes(b"ssh-ed25519 " + SECRET)
        (self.home / ".one/one_auth").write_bytes(SECRET)
        (self.home / "one.db").write_bytes(SECRET)
        self.oned.datastores[OTHERS] = Datastore(
            OTHERS,
            "others",
            0,
            "semishared",
            "semishared",
            str(self.location / str(OTHERS)),
            {"TYPE": "IMAGE_DS"},
        )
        for store in (OTHERS, STORE):
            path = self.location / str(store) / ("e" * 32)
            make_image(path, "raw", 1 << 20)
            with path.open("r+b") as file:
                file.write(SECRET)
            side = f"{path.parent}/.semishared/{path.name}"
            for part in (f"{path}.snap/0", f"{side}/clones/66-0", f"{side}/note"):
                Path(part).parent.mkdir(parents=True, exist_ok=True)
                Path(part).write_bytes(SECRET)
            self.oned.images[900 + store] = Image(
                900 + store,
                f"of-others-{store}",
                2,
                True,
                store,
                "others",
                {},
                source=str(path),
                format="raw",
                uid=7,
            )
        for folder in self.vms_of_others():
            (folder / ".semishared").mkdir(parents=True)
            (folder / "disk.0").write_bytes(SECRET)
            (folder / ".semishared/disk.0.json").write_bytes(SECRET)

        for vm, state in ((5066, 8), (5067, 9)):  # powered off; undeployed
            self.oned.vms[vm] = Vm(vm, f"of-others-{vm}", {}, {}, state)
            self.oned.vms[vm].history.append(History(vm, 0, self.oned.host(HONEST), "semishared", SYSTEM))

    def vms_of_others(self) -> Tuple[Path, Path]:
        return self.location / "101/5067", self.top / "hosts" / HONEST / "101/5066"

    # -- what is done -------------------------------------------------------------------------------

    def place(self, vm: int, number: int = 0, host: str = LIAR) -> str:
        return f"{host}:{self.disk(vm, number)}"

    def make(self, action: str, vm: int, number: int = 0) -> Path:
        image = self.oned.image(int(self.oned.vm(vm).disks[number]["IMAGE_ID"]))
        self.tm(action, f"fe:{image.source}", self.place(vm, number), vm, STORE)
        return self.disk(vm, number)

    def on(self, vm: int, state: int, lcm: int, host: str = LIAR) -> None:
        """Let oned have a VM on a host."""
        held = self.oned.vm(vm)
        held.state, held.lcm = state, lcm
        held.history.append(History(vm, len(held.history), self.oned.host(host), "semishared", SYSTEM))

    def lying(self, lie: Dict[str, Any]) -> None:
        """Have the host lie from now on; {}: speak the truth, and note it."""
        self.honest()
        (self.top / "hosts" / LIAR / "lie.json").write_text(json.dumps(lie))

    def honest(self) -> None:
        """Have it be what it seems."""
        for name in ("heard", "said.jsonl", "lie.json"):
            (self.top / "hosts" / LIAR / name).unlink(missing_ok=True)

    def truth(self) -> List[Tuple[str, Any]]:
        """Return what it has answered."""
        path = self.top / "hosts" / LIAR / "said.jsonl"
        return (
            [(name, answer) for name, answer in map(json.loads, path.read_text().splitlines())]
            if path.exists()
            else []
        )

    def heard(self) -> bytes:
        path = self.top / "hosts" / LIAR / "heard"
        return path.read_bytes() if path.exists() else b""

    # -- what is others' ----------------------------------------------------------------------------

    def of_others(self) -> Dict[str, Any]:
        """Return all that no action on a VM of the host may change: by path its kind, rights and content."""
        tops = [
            self.home,
            self.location / str(OTHERS),
            *self.vms_of_others(),
            self.bin,
            self.auth,
            *self.location.glob(f"{STORE}/{'e' * 32}*"),
            *self.location.glob(f"{STORE}/.semishared/{'e' * 32}*"),
        ]
        found: Dict[str, Any] = {
            str(self.location): sorted(
                name for name in os.listdir(self.location) if not name.startswith(".semi")
            )
        }
        for top in tops:
            for path in (top, *sorted(top.rglob("*"))):
                info = os.lstat(path)
                content: Any = os.readlink(path) if stat.S_ISLNK(info.st_mode) else ""
                if stat.S_ISREG(info.st_mode):
                    content = hashlib.sha256(path.read_bytes()).hexdigest()
                found[str(path)] = (info.st_mode, info.st_uid, content)
        return found
