# SPDX-License-Identifier: Apache-2.0
"""What AppArmor would let QEMU open: libvirt's own virt-aa-helper on the XML that the installed vmm/deploy
hands on.

As nobody, to whom no layer is readable: under its own profile the helper may not read layers either. That
QEMU then starts, under a kernel that enforces it, is shown in tests/nfs/test_apparmor.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Iterator
from xml.etree import ElementTree

import pytest

from semishared.model import steps as s
from tools.test_vmm import Host
from tools.world import World, lay_over

HELPER = "/usr/lib/libvirt/virt-aa-helper"
UUID = "75b33178-6a6b-4667-b9b8-64da283038a7"
AS_NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
DISK = """
		<disk type='file' device='disk'>
			<source file='{}/disk.{}'/>
			<target dev='vd{}' bus='virtio'/>
			<driver name='qemu' type='raw' cache='none' discard='unmap'/>
		</disk>"""
pytestmark = pytest.mark.skipif(
    not os.access(HELPER, os.X_OK) or os.geteuid() != 0, reason="no virt-aa-helper, or not root"
)


class Site:
    """A host with its stores, and the installed hypervisor directory."""

    def __init__(self, top: Path) -> None:
        self.world = World(top)
        self.host = Host(top)
        self.host.stores = self.world.location
        self.host.vm_dir = self.world.location / "101" / "7"
        self.host.spelled = f"{self.world.location}//101/7"

    def deployed(self, disks: int) -> bytes:
        """Return the XML that the stock script would give to libvirt."""
        text = "".join(DISK.format(self.host.spelled, number, "abcdefgh"[number]) for number in range(disks))
        before = (
            f"<domain type='qemu'>\n\t<name>one-7</name>\n\t<uuid>{UUID}</uuid>\n\t<memory>8192</memory>\n\t<os>"  # noqa: E501
            f"<type arch='x86_64' machine='q35'>hvm</type></os>\n\t<devices>{text}\n\t</devices>\n</domain>\n"
        )
        return self.host.passes("deploy", *self.host.deploy_argv(), stdin=before.encode()).stdin

    def rules(self, domain: bytes) -> dict[str, str]:
        """Return what the helper lets QEMU do with files of ours.

        On the host's own disk it may go everywhere and read no layer; on the store it is who a squashed root
        is: nobody.
        """
        for top in (self.world.location / "101", self.world.root):
            for folder, _, files in os.walk(top):
                os.chmod(folder, 0o755)
                for name in files:
                    if not os.path.islink(os.path.join(folder, name)):
                        os.chmod(os.path.join(folder, name), 0o600)
        done = subprocess.run(
            [*AS_NOBODY, HELPER, "-d", "-c", "-u", f"libvirt-{UUID}"],
            input=domain,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        found = re.findall(r'^  "([^"]+)" (\w+),$', done.stdout.decode(), re.MULTILINE)
        return {path: permitted for path, permitted in found if path.startswith(str(self.world.location))}


@pytest.fixture
def site() -> Iterator[Site]:
    # Not pytest's own place, where nobody may go.
    top = Path(tempfile.mkdtemp(prefix="apparmor-", dir="/var/tmp"))
    os.chmod(top, 0o755)
    try:
        yield Site(top)
    finally:
        shutil.rmtree(top)


@pytest.mark.fault(20, "AppArmor's rules name every layer of a disk and the base below")
def test_rules_of_apparmor_name_the_whole_chain_though_no_layer_can_be_read(site: Site) -> None:
    world = site.world
    disk = world.disk(7, 0)
    world.clone(world.image(), disk)
    for layer in (1, 2):
        world.on(s.AddLayer(disk, layer, layer - 1, "qcow2"), s.ActivateLayer(disk, layer, "qcow2"))
    rules = site.rules(site.deployed(1))
    layers = [f"{disk.path}.snap/{layer}" for layer in range(3)]
    (lease,) = world.root.glob("bases/*/leases/7-0")
    assert rules == {layers[2]: "rwk", layers[1]: "rk", layers[0]: "rk", str(lease): "rk"}


@pytest.mark.fault(
    20, "where the export squashes root, AppArmor's rules are for the image and not for our link to it"
)
def test_rules_of_apparmor_are_for_the_image_where_root_is_squashed(site: Site) -> None:
    world = site.world
    raw, qcow2 = world.image("r"), world.image("q", "qcow2")
    cloned, mine = world.disk(7, 0), world.disk(7, 1)
    world.on(s.PrepareVm(7, cloned.vm_dir), s.CloneOnStore(cloned, qcow2, 0))
    world.link(raw, mine)
    clone = f"{world.store}/.semishared/q/clones/7-0.snap/0"
    rules = site.rules(site.deployed(2))
    assert rules == {clone: "rwk", qcow2.source: "rk", raw.source: "rwk"}
    for path in rules:
        # A hot attach and a live snapshot ask for this, as root.
        subprocess.run([*AS_NOBODY, "stat", path], check=True, stdout=subprocess.DEVNULL)
    # It may go through what is ours there, and see nothing.
    assert subprocess.run(
        [*AS_NOBODY, "ls", os.path.dirname(clone)], capture_output=True, check=False
    ).returncode


def test_raw_copy_with_a_snapshot_names_its_raw_layer_as_raw(site: Site) -> None:
    """Its first bytes are its guest's, who may have written a qcow2 header into it."""
    world = site.world
    disk = world.disk(7, 0)
    image = world.image()
    world.on(s.PrepareVm(7, disk.vm_dir), s.CopyImage(disk, image, 0))
    lay_over(world.top / "evil", "/etc/shadow")
    subprocess.run(
        ["dd", f"if={world.top}/evil", f"of={disk.path}.snap/0", "conv=notrunc", "status=none"], check=True
    )
    world.on(s.AddLayer(disk, 1, 0, "raw"), s.ActivateLayer(disk, 1, "qcow2"))
    domain = site.deployed(1)
    below = ElementTree.fromstring(domain).find("devices/disk/backingStore")
    assert below is not None and [child.tag for child in below.iter("backingStore")] == [
        "backingStore",
        "backingStore",
    ]
    assert b"/etc/shadow" not in domain
    assert site.rules(domain) == {f"{disk.path}.snap/1": "rwk", f"{disk.path}.snap/0": "rk"}


def test_a_disk_whose_chain_is_not_plain_is_refused_before_anything_starts(site: Site) -> None:
    world, host = site.world, site.host
    disk = world.disk(7, 0)
    path = world.clone(world.image(), disk)
    layer = f"{path}.snap/0"
    (lease,) = world.root.glob("bases/*/leases/7-0")

    def lies_over(name: str, *words: str) -> None:
        subprocess.run(
            ["qemu-img", "rebase", "-u", "-f", "qcow2", "-b", name, *words, layer],
            check=True,
            cwd=host.vm_dir,
        )

    def refused() -> str:
        domain = f"<domain><devices>{DISK.format(host.spelled, 0, 'a')}</devices></domain>"
        return host.refuses("deploy", *host.deploy_argv(), stdin=domain.encode())

    lies_over("nbd://10.0.0.1/x", "-F", "raw")
    assert "SS082" in refused() and "nbd:" in refused()
    lies_over("json:{}", "-F", "qcow2")
    assert "SS082" in refused()
    lies_over("0", "-F", "qcow2")
    assert "or over itself" in refused()
    lies_over(str(lease), "-F", "vmdk")
    assert "known format" in refused()
    lies_over(f"{lease}x", "-F", "raw")
    line = refused()
    assert line.startswith("SS020 VM 7 disk 0: ") and ", which a disk lies over, is not there" in line
    assert line.endswith(f"[deploy; {lease}x]")
    lies_over(str(lease), "-F", "raw")
    with open(layer, "r+b") as file:
        file.seek(16)
        file.write((1 << 20).to_bytes(4, "big"))
    # A name that cannot be read is not no name: the guest would see zeros where its data is.
    assert "SS082" in refused()
    words = ["-o", f"data_file={world.top}/elsewhere", layer, "1M"]
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *words], check=True)
    assert "data file of its own" in refused()


def test_image_in_place_that_lies_over_a_file_is_refused(site: Site) -> None:
    world = site.world
    image = world.image("q", "qcow2")
    world.on(s.PrepareVm(7, world.disk(7, 0).vm_dir))
    world.link(image, world.disk(7, 0))
    subprocess.run(
        ["qemu-img", "rebase", "-u", "-f", "qcow2", "-b", "/etc/passwd", "-F", "raw", image.source],
        check=True,
    )
    domain = f"<domain><devices>{DISK.format(site.host.spelled, 0, 'a')}</devices></domain>"
    assert "has a backing file" in site.host.refuses(
        "deploy", *site.host.deploy_argv(), stdin=domain.encode()
    )
