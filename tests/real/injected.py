# SPDX-License-Identifier: Apache-2.0
"""Scripts that fail with a line of their own, and the VM to which that happens."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from lab.guest import content
from lab.oned.states import Img
from real.conftest import SEMISHARED, RealCloud
from real.front_end import REMOTES
from real.oned import BEGINS_S, RECOVER

KIB = 64
DATA = content("base", 0, KIB)
SAID = "SS999 disk 1: no such luck"
HOSTS_SCRIPTS = "/var/tmp/one/vmm"
WRAPPER = """#!/bin/sh
case "$*" in *'{only}'*)
    {work}
    echo '{said}' >&2
    exit 1 ;;
esac
exec "$0.real" "$@"
"""


@contextmanager
def _replaced(path: Path, only: str, work: str) -> Iterator[None]:
    real = path.with_name(f"{path.name}.real")
    path.rename(real)
    shutil.copy2(real, path)
    path.write_text(WRAPPER.format(only=only, work=work, said=SAID))
    try:
        yield
    finally:
        os.replace(real, path)


@contextmanager
def failing(cloud: RealCloud, action: str, only: str = "", work: str = "") -> Iterator[None]:
    """Have calls of a transfer action fail, all, or of those that name `only`; before it `work`, in sh."""
    with _replaced(cloud.lab.fe.path(f"{REMOTES}/tm/semishared/{action}"), only, work):
        yield


@contextmanager
def failing_on(cloud: RealCloud, host: str, script: str, work: str = "") -> Iterator[None]:
    """Have a hypervisor's script on a host, as kvm/deploy, fail; `work` is done before."""
    with _replaced(cloud.lab.node(host).path(f"{HOSTS_SCRIPTS}/{script}"), "", work):
        yield


ALL_THE_SAME = '"$0.real" "$@" || exit'
"""The `work` of a script that does all of its work, of which its caller learns that it failed."""


class Disks:
    """A VM with a disk in place and one that is its own."""

    def __init__(self, cloud: RealCloud, os_image: int, name: str) -> None:
        self.cloud = cloud
        self.mine = cloud.data_image(f"{name}-mine", DATA, persistent=True)
        self.own = cloud.data_image(f"{name}-own", DATA, format="qcow2")
        images = (os_image, self.mine, self.own)
        self.vm = cloud.create(name, [{"IMAGE_ID": str(image)} for image in images])
        self.is_written, self.has_own = False, True

    @property
    def at(self) -> tuple[str, int]:
        """Return where oned has it: names of STATE, number of LCM_STATE."""
        return self.cloud.oned.state(self.vm)

    @property
    def host(self) -> str:
        """Return the host of its last history record."""
        return self.cloud.oned.vm(self.vm).last.host.name

    def deploy(self) -> None:
        """Start it on h1."""
        self.cloud.oned.vm_deploy(self.vm, "h1", 101)

    def write(self) -> None:
        """See that both disks hold their images, and write to them."""
        guest = self.cloud.guest(self.vm)
        for disk in ("vdb", "vdc"):
            guest.check(disk, "base", 0, KIB)
            guest.write(disk, "new", 8192, 64)
        guest.sync()
        self.is_written = True

    def started(self) -> Disks:
        """Start it on h1, write, and return it."""
        self.deploy()
        self.write()
        return self

    def check(self) -> None:
        """See that both disks, or the one that it still has, hold what was written."""
        guest = self.cloud.guest(self.vm)
        for disk in ("vdb", "vdc") if self.has_own else ("vdb",):
            guest.check(disk, "base", 0, KIB)
            guest.check(disk, "new", 8192, 64)

    def gone(self) -> None:
        """End it, and see that nothing is left and nothing lost."""
        if self.at[0] != "DONE":
            self.cloud.terminate(self.vm)
        assert self.cloud.leftovers() == []
        expected = content("new", 8192, 64) if self.is_written else bytes(64 << 10)
        assert self.cloud.read(self.cloud.source(self.mine), "raw", 64 << 10, 8192 << 10) == expected
        for image in (self.mine, self.own):
            assert self.cloud.oned.image(image).state in (Img.READY, Img.ERROR)
            self.cloud.oned.image_delete(image)


def seen(cloud: RealCloud, vm: int) -> str:
    """Return what the user reads."""
    error = cloud.oned.error(vm)
    assert SAID in error, error
    return error


def recover_failure(cloud: RealCloud, vm: int) -> None:
    """Tell oned that what hangs, or has failed, has failed; of some states nothing follows."""
    cloud.oned.api.call("vm.recover", vm, RECOVER["failure"])
    time.sleep(BEGINS_S)


def nothing_to_remove(cloud: RealCloud) -> None:
    """See that gc finds nothing but bases of images that are gone, and status names nothing that is kept."""
    found = cloud.lab.fe.run([SEMISHARED, "gc", "--now", "--dry-run"], check=False, timeout=300)
    lines = (found.stdout + found.stderr).decode().splitlines()
    assert [line for line in lines[:-1] if "not known to oned" not in line or ": base " not in line] == []
    assert lines[-1:] == [] or lines[-1].endswith(", 0 kept, 0 errors"), lines
    status = cloud.lab.fe.run([SEMISHARED, "status", "--json"], check=False, timeout=300)
    assert json.loads(status.stdout)["kept"] == []
