# SPDX-License-Identifier: Apache-2.0
"""One cloud of a real OpenNebula for all tests here: two hosts with our drivers, stock datastores beside."""

from __future__ import annotations

import time
from typing import Iterator

import pytest

from lab.cloud import Cloud
from lab.guest import BOOT, lay_out_boot
from real import front_end
from real.front_end import OpenNebula
from real.oned import RealOned

SEMISHARED = "/var/lib/one/remotes/lib/semishared/semishared"
INSTALL = "/opt/semishared/install.sh"


class RealCloud(Cloud):
    """A cloud whose oned is a real one."""

    one: OpenNebula
    oned: RealOned  # type: ignore[assignment]


def wait_on(oned: RealOned, hosts: int, patience: float = 400.0) -> None:
    """Wait until all hosts are on, as the scheduler wants them."""
    deadline = time.monotonic() + patience
    while [row.findtext("STATE") for row in oned.api.pool("host")].count("2") < hosts:
        if time.monotonic() > deadline:
            raise TimeoutError("the hosts are not on")
        time.sleep(1)


@pytest.fixture(scope="session")
def cloud() -> Iterator[RealCloud]:
    with front_end.up(hosts=2) as (one, oned):
        wait_on(oned, 2)
        lab = one.lab
        lab.bring_checkout()
        lab.fe.run([INSTALL, "--yes"], user="root", timeout=300)
        one.restart()
        one.cli("onehost", "sync", "--force")
        oned.datastore_create('NAME="semi_img" TYPE="IMAGE_DS" DS_MAD="semishared" TM_MAD="semishared"', 100)
        for number in (101, 102):
            oned.datastore_create(f'NAME="semi_sys_{number}" TYPE="SYSTEM_DS" TM_MAD="semishared"', number)
        for host in lab.hosts:
            lay_out_boot(host.path(BOOT))
        lab.fe.run([SEMISHARED, "setup", "--apply", "--system", "semi_sys_101"], timeout=300)
        cloud = RealCloud(lab, oned)  # type: ignore[arg-type]
        cloud.one = one
        yield cloud


@pytest.fixture(scope="session")
def os_image(cloud: RealCloud) -> int:
    return cloud.os_image()


@pytest.fixture(autouse=True)
def only_this_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remove the VMs that a failing test leaves, so that the next one is judged for itself."""
    yield
    if "cloud" in request.fixturenames:
        request.getfixturevalue("cloud").delete_all()
