# SPDX-License-Identifier: Apache-2.0
"""The units of memory under systemd itself, on a kernel host that it has booted."""

from __future__ import annotations

import pytest

from lab.kernel_host import KernelHost
from nfs.test_memory import INSTALL, MEMORY, ROOT, MemoryHost
from semishared.model import steps_device as d

MEMORY_UNIT, WATCH = "semishared-ram.service", "semishared-ram-watch.service"
LONG_S = 300


class Machine(MemoryHost):
    """A host on which systemd runs."""

    def __init__(self) -> None:
        KernelHost.__init__(self, "ram", memory_mib=1400, disks={"local": 400}, kernel_arguments="kh_systemd=1")
        self._side = None

    def systemctl(self, *words: str, check: bool = True) -> str:
        done = self.run(["systemctl", "--no-pager", *words], timeout=LONG_S, check=check)
        return (done.out + done.err).strip()

    def enable(self, *words: str) -> None:
        self.run(["sh", f"{INSTALL}/semishared-ram.sh", "enable", *words], timeout=LONG_S)


@pytest.mark.long
def test_systemd_makes_memory_and_has_it_watched() -> None:
    with Machine() as host:
        host.wait_up()
        host.systemctl("is-system-running", "--wait", check=False)
        host.prepare()
        host.enable("320M", "zram", "2")
        assert host.systemctl("is-enabled", MEMORY_UNIT, WATCH).split() == ["enabled"] * 2
        assert host.run(["findmnt", "-n", "-o", "SOURCE,FSTYPE", MEMORY]).out.split() == ["/dev/zram0", "xfs"]
        host.on(d.SetDevices(ROOT, (f"{MEMORY}=ram:2",)))
        row = host.row()
        assert (row["class"], row["state"], row["weight"]) == ("ram", "", 2)
        assert host.systemctl("is-active", MEMORY_UNIT, WATCH).split() == ["active"] * 2
