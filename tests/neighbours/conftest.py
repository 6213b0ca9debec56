# SPDX-License-Identifier: Apache-2.0
"""A simulated oned with a stock pair of datastores, 1 and 0, and the operator's command."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from lab import forks
from lab.oned import Oned, Settings
from semishared.opennebula.xml import Datastore
from semishared.plan.care.checks import Finding
from semishared.plan.care.diagnosis_scheduler import of_scheduler

ROOT = Path(__file__).resolve().parents[2]


class Site:
    """A simulated oned whose drivers only make images and measure datastores."""

    def __init__(self, oned: Oned, top: Path) -> None:
        self.oned, self.top = oned, top
        self.auth = top / "one_auth"

    def semishared(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run the operator's command."""
        assert self.oned.rpc
        env = {"PATH": os.environ["PATH"], "ONE_XMLRPC": self.oned.rpc.url, "ONE_AUTH": str(self.auth)}
        words = (*forks.python(), str(ROOT / "bin/semishared"), *words)
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done

    def setup(self, *words: str, code: int = 0) -> str:
        """Run setup, and return what it says."""
        return self.semishared("setup", *words, code=code).stdout

    def findings(self) -> List[Finding]:
        """Return what doctor finds of what oned says of its datastores (as root it does not run)."""
        return of_scheduler([Datastore.parse(one.to_xml()) for one in self.oned.datastores.values()], "fe")

    def image(self, store: int, name: str, **more: Any) -> int:
        return self.oned.image_create(store, name, size=8, type="DATABLOCK", format="raw", **more)

    def vm(self, *images: int) -> int:
        """Make a VM that waits for the scheduler."""
        disks = [{"IMAGE_ID": str(image)} for image in images]
        return self.oned.vm_create({"NAME": "vm", "DISK": disks}, hold=False)

    def round(self) -> Any:
        """Do a round of the scheduler, up to where oned begins to deploy."""
        return self.oned.schedule(self.oned.would_deploy)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    for driver in ("semishared", "fs"):
        scripts = tmp_path / f"fe/var/lib/one/remotes/datastore/{driver}"
        scripts.mkdir(parents=True)
        for name, said in (("monitor", "USED_MB=1 TOTAL_MB=3 FREE_MB=2"), ("mkfs", "/images/$$"), ("rm", "")):
            (scripts / name).write_text(f"#!/bin/sh\ncat >/dev/null\necho {said}\n")
            (scripts / name).chmod(0o755)
    (tmp_path / "one_auth").write_text("oneadmin:password\n")
    with Oned.in_tree(tmp_path, Settings()) as oned:
        oned.host_create("h1")
        oned.datastore_create('NAME="system" TYPE="SYSTEM_DS" TM_MAD="qcow2"', 0)
        oned.datastore_create('NAME="default" TYPE="IMAGE_DS" DS_MAD="fs" TM_MAD="qcow2"', 1)
        yield Site(oned, tmp_path)
