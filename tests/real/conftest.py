# SPDX-License-Identifier: Apache-2.0
"""One cloud of a real OpenNebula for all tests here: two hosts with our drivers, stock datastores beside."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Sequence, Tuple

import pytest

from lab.cloud import RBD_STORE, Cloud
from lab.guest import BOOT, lay_out_boot
from lab.oned import Img
from real import front_end
from real.front_end import OpenNebula
from real.oned import RealOned
from system.conftest import figure, image_for, os_image  # noqa: F401 - fixtures

SEMISHARED = "/var/lib/one/remotes/lib/semishared/semishared"
INSTALL = "/opt/semishared/install.sh"


class RealCloud(Cloud):
    """A cloud whose oned is a real one."""

    one: OpenNebula
    oned: RealOned  # type: ignore[assignment]

    def template(
        self,
        name: str,
        disks: Sequence[Dict[str, str]],
        machine: str = "pc",
        context: bool = True,
        **more: Any,
    ) -> Dict[str, Any]:
        """Return what every cloud returns; its RAW is not held against libvirt's schema."""
        template = super().template(name, disks, machine, context, **more)
        template["RAW"]["VALIDATE"] = "no"
        return template

    def forgive(self) -> None:
        """Do as every cloud does, while there is one to look at."""
        if self.lab.fe.up:
            super().forgive()


def wait_until(true: Callable[[], object], else_: str, patience: float = 400.0) -> None:
    """Wait for something that OpenNebula finds out by itself."""
    deadline = time.monotonic() + patience
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(else_)
        time.sleep(1)


def wait_on(oned: RealOned, hosts: int) -> None:
    """Wait until all hosts are on, as the scheduler wants them."""
    states = lambda: [row.findtext("STATE") for row in oned.api.pool("host")]  # noqa: E731
    wait_until(lambda: states().count("2") == hosts, "the hosts are not on")


collect_ignore = [] if os.environ.get("THROUGH") else ["test_upgrade.py"]
"""A test that leaves another version behind is run alone (`make real-upgrade`)."""


@pytest.fixture(scope="session")
def cloud() -> Iterator[RealCloud]:
    with brought_up(ceph=True) as found:
        yield found


@contextmanager
def brought_up(ceph: bool, hosts: int = 2, stores: Tuple[int, ...] = (100,)) -> Iterator[RealCloud]:
    """Put up a cloud with our drivers, set up as an administrator does."""
    with front_end.up(hosts, stores, ceph) as (one, oned):
        wait_on(oned, hosts)
        lab = one.lab
        lab.bring_checkout()
        lab.fe.run([INSTALL, "--yes"], user="root", timeout=300)
        one.restart()
        one.cli("onehost", "sync", "--force")
        oned.datastore_create('NAME="semi_img" TYPE="IMAGE_DS" DS_MAD="semishared" TM_MAD="semishared"', 100)
        for number in (101, 102):
            oned.datastore_create(f'NAME="semi_sys_{number}" TYPE="SYSTEM_DS" TM_MAD="semishared"', number)
        if ceph:
            other = 'NAME="other" TYPE="SYSTEM_DS" TM_MAD="ssh"'
            while (made := oned.datastore_create(other)) < RBD_STORE - 1:
                oned.datastore_delete(made)  # oned counts on
            oned.datastore_delete(made)
            oned.datastore_create(lab.ceph.datastore(), RBD_STORE)
        wait_until(
            lambda: oned.datastore(100).free_mb and oned.datastore(1).free_mb, "what is free is not known"
        )
        for host in lab.hosts:
            lay_out_boot(host.path(BOOT))
        words = ["setup", "--apply", "--stock-compatible", "--system", "semi_sys_101"]
        lab.fe.run([SEMISHARED, *words], timeout=300)
        cloud = RealCloud(lab, oned)  # type: ignore[arg-type]
        cloud.one = one
        yield cloud


@pytest.fixture(autouse=True)
def only_this_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remove what a failing test leaves, so that the next one is judged for itself."""
    yield
    if "cloud" in request.fixturenames and not {"hot", "own"} & set(request.fixturenames):
        cloud = request.getfixturevalue("cloud")
        cloud.delete_all()
        for image in cloud.oned.images.values():
            if image.state == Img.ERROR:
                cloud.oned.api.call("image.delete", image.id, True)  # also of one whose driver cannot
