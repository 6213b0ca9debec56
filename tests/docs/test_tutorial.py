# SPDX-License-Identifier: Apache-2.0
"""The tutorial, command by command, from a front-end without semishared; its output is what the page shows.

REGENERATE=1 writes the output into the pages.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Dict, List

from configurations import oned_conf, vmm_execrc
from docs.console import Command, comparable, rewrite
from lab import Lab
from lab.cloud import Cloud
from lab.guest import LINUX, write_guest_image
from lab.one_cli import Cli
from lab.oned import Oned, Settings

DOCS = Path(__file__).resolve().parents[2] / "docs"
HOMES = {"root": "/opt/semishared", "oneadmin": "/var/lib/one"}


def stock_front_end(lab: Lab) -> None:
    """Make of the front-end what OpenNebula's packages leave, with a checkout of ours beside it."""
    lab.unpack()
    etc = lab.fe.path("/etc/one")
    (etc / "vmm_exec").mkdir(parents=True)
    (etc / "oned.conf").write_text(oned_conf())
    (etc / "vmm_exec/vmm_execrc").write_text(vmm_execrc())
    # systemd's sign that it runs: the next commands are given for it.
    lab.fe.run(["mkdir", "-p", "/run/systemd/system"], user="root")
    write_guest_image(lab.fe.path("/var/tmp/os.img"), LINUX)
    with lab.fe.path("/var/tmp/data.img").open("wb") as file:
        file.truncate(16 << 20)
    lab.fe.run(["chown", "oneadmin:", "/var/tmp/os.img", "/var/tmp/data.img"], user="root")


def test_tutorial() -> None:
    pages: Dict[Path, str] = {}
    with Lab.up(hosts=2, stores=(100,)) as lab:
        stock_front_end(lab)
        with Oned.in_lab(lab, Settings(domain_type=lab.virt, vm_mad=lab.virt)) as oned:
            cloud = Cloud(lab, oned)
            cli = Cli(lab, oned)
            path = ["/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]

            def execute(command: Command) -> List[str]:
                words = shlex.split(command.lines[0])
                if command.text.startswith("onevm terminate --hard web") and command.text.endswith("web"):
                    at_work(cloud)
                if cli.knows(words):
                    return cli.run(words).splitlines()
                if words[0] == "export":
                    path[0] += ":/var/lib/one/remotes/lib/semishared"
                    assert words[1] == "PATH=$PATH:/var/lib/one/remotes/lib/semishared"
                    return []
                done = lab.fe.run(
                    ["sh", "-c", command.text],
                    user=command.user,
                    cwd=HOMES[command.user],
                    env={"PATH": path[0]},
                    check=False,
                )
                assert not done.stderr, (command.text, done.stderr)
                assert done.returncode == 0, (command.text, done.stdout)
                return done.stdout.decode().splitlines()

            rewrite(DOCS / "tutorial" / "first-vm.md", execute, pages.__setitem__)
            assert cloud.leftovers() == []
            data = next(image for image in oned.images.values() if image.name == "data")
            assert cloud.read(data.source, "raw", 4096)[:4096] != bytes(4096), (
                "what the guest wrote is in the image"
            )
    for page, text in pages.items():
        if os.environ.get("REGENERATE") and comparable(page.read_text()) != comparable(text):
            page.write_text(text)
        assert comparable(page.read_text()) == comparable(text), (
            f"{page}: REGENERATE=1 writes what was printed"
        )


def at_work(cloud: Cloud) -> None:
    """See that the guest has both disks, and let it write to the persistent one."""
    guest = cloud.guest(0)
    assert {"vda", "vdb"} <= set(guest.disks())
    guest.write("vdb", "tutorial", 0, 64)
    guest.check("vdb", "tutorial", 0, 64)
