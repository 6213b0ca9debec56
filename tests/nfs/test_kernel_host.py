# SPDX-License-Identifier: Apache-2.0
"""The kernel hosts themselves: what their README promises to those who build tests on them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from lab import caches
from lab.kernel_host import ONEADMIN, KernelHost, KernelHostError, Wire


@pytest.mark.long
def test_a_kernel_host_runs_programs_of_this_machine_and_leaves_nothing() -> None:
    with Wire() as wire, KernelHost("k1", wire, disks={"d": 320}) as one, KernelHost("k2", wire) as two:
        folder = one._folder
        assert one.run(["uname", "-n"]).out.strip() == "k1"
        assert one.run(["id", "-u"], user=ONEADMIN).out.strip() == str(ONEADMIN[0])
        assert one.run(["cat"], stdin=b"x" * 200000).out == "x" * 200000
        assert one.run(["sh", "-c", "echo no >&2; exit 3"], check=False) == (3, "", "no\n")
        with pytest.raises(KernelHostError, match="ended with 3"):
            one.run(["sh", "-c", "exit 3"])
        with pytest.raises(KernelHostError, match="not ended in 1 s"):
            one.run(["sleep", "1000"], timeout=1)
        assert one.run(["head", "-n1", f"{caches.CHECKOUT}/README.md"]).out
        assert one.run(["touch", f"{caches.CHECKOUT}/x"], check=False).code
        one.put("/etc/semishared-lab/x", b"hello")
        assert one.run(["cat", "/etc/semishared-lab/x"]).out == "hello" and not os.path.exists(
            "/etc/semishared-lab"
        )
        one.mount_disk("d", "/srv/d")
        one.run(
            ["qemu-io", "-t", "none", "-f", "raw", "-c", "write 0 64k", "/srv/d/f"],
            user=ONEADMIN,
            check=False,
        )
        knock = ["bash", "-c", f"</dev/tcp/{one.address}/9"]
        assert "refused" in two.run(knock, check=False).err
        two.cut()
        with pytest.raises(KernelHostError):
            two.run(knock, timeout=5)
        two.mend()
        assert "refused" in two.run(knock, check=False).err
        one.freeze()
        with pytest.raises(KernelHostError):
            one.run(["true"], timeout=2)
        one.thaw()
        one.run(["true"])
    assert not folder.exists()


@pytest.mark.long
def test_a_kernel_host_does_not_outlive_its_test() -> None:
    code = (
        "import os, time; from lab.kernel_host import KernelHost; h = KernelHost('k'); h.start(); "
        "print(h._folder, *"
        "(p.pid for p in h._processes), flush=True); time.sleep(100)"
    )
    env = {**os.environ, "PYTHONPATH": f"{caches.CHECKOUT}/tests:{caches.CHECKOUT}/lib"}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        folder, *pids = owner.stdout.readline().split()
        owner.kill()
    try:
        deadline = time.monotonic() + 10
        while any(_runs(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        subprocess.run(["rm", "-rf", "--", folder], check=True)


def _runs(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_one_that_does_not_boot_says_what_its_console_said() -> None:
    host = KernelHost("k", kernel_arguments="rdinit=/nowhere")
    with host, pytest.raises(KernelHostError, match="(?s)(ended|is not up).*console"):
        host.wait_up(60)
