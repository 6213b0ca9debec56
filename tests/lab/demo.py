# SPDX-License-Identifier: Apache-2.0
"""`make demo`: two hosts, one OS image, one data image, four VMs; where every disk lived and what it cost the
store.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from dataclasses import dataclass, field
from typing import Dict, List, Tuple

from lab import moved
from lab.cloud import DATASTORES, STORE, SYSTEM, Cloud
from lab.guest import content
from lab.oned import ActionFailed

PAYLOAD_MIB = 640
"""Data put behind the bootable part of the OS image, so that a full copy costs something."""
VIRTUAL_MIB = 2048
WROTE = (4096, 1024)
"""Offset and length in KiB of what guests write on their data disks."""
started = time.monotonic()


def say(text: str) -> None:
    """Show progress."""
    print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)


@dataclass
class Row:
    """What is known of one VM at the end."""

    name: str
    vm: int
    host: str
    persistent: bool
    deploy_s: float = 0.0
    boot_s: float = 0.0
    places: List[str] = field(default_factory=list)
    store_read: int = 0
    store_written: int = 0
    proof: str = ""


def images(cloud: Cloud) -> Tuple[int, int, int]:
    """Upload the OS image and the data image, and clone the latter; return their ids."""
    from lab.guest import LINUX, write_guest_image

    path = cloud.upload_file("debian.img")
    write_guest_image(path, LINUX)
    with path.open("r+b") as file:
        file.seek(0, 2)
        block = hashlib.sha512(b"semishared").digest() * 16384
        for number in range(PAYLOAD_MIB):
            file.write(hashlib.sha256(str(number).encode()).digest() + block[32:])
        file.truncate(VIRTUAL_MIB << 20)
    cloud.give(path)
    os_image = cloud.oned.image_create(STORE, "debian", path="/var/tmp/debian.img", prefix="vd")
    say(
        f"OS image uploaded: {VIRTUAL_MIB} MiB, {path.stat().st_blocks * 512 >> 20} MiB of data, "
        f"non-persistent"
    )
    data = cloud.data_image("data", content("data", 0, 256), mib=64, persistent=True)
    say("data image uploaded: 64 MiB, persistent")
    copy = cloud.oned.image_clone(data, "data-2")
    cloud.oned.image_persistent(copy, True)
    say("data image cloned, its clone made persistent")
    return os_image, data, copy


def full_copy(cloud: Cloud, source: str) -> float:
    """Copy the OS image to a host as the stock ssh driver does (sparse tar through ssh); return the
    seconds.
    """
    name = source.rsplit("/", 1)[1]
    before = time.monotonic()
    cloud.lab.fe.run(
        [
            "bash",
            "-c",
            f"tar -C {DATASTORES}/{STORE} -cSf - {name} | ssh h2 'tar -C /var/tmp -xSf - && rm "
            f"/var/tmp/{name}'",
        ],
        timeout=170,
    )
    return time.monotonic() - before


def copied(stderr: List[str]) -> int:
    """Return the bytes that our own copies read from the store, as the drivers reported them."""
    return sum(moved.total(text, "store_read") for text in stderr)


def guest_io(cloud: Cloud, row: Row) -> Tuple[int, int]:
    """Return bytes the hypervisor read from and wrote to disks on the store, by its block statistics."""
    node = cloud.lab.node(row.host)
    virsh = ["virsh", "-q", "-c", "qemu:///system"]
    domain = f"one-{row.vm}"
    read = written = 0
    for line in node.run([*virsh, "domblklist", domain]).stdout.decode().splitlines():
        target, _, source = line.strip().partition(" ")
        if f"/{STORE}/" in source:
            text = node.run([*virsh, "domblkstat", domain, target]).stdout.decode()
            values: Dict[str, int] = {
                key: int(value) for key, value in re.findall(r"(rd_bytes|wr_bytes) (\d+)", text)
            }
            read, written = read + values["rd_bytes"], written + values["wr_bytes"]
    return read, written


def run_vm(cloud: Cloud, row: Row, disks: List[Dict[str, str]]) -> None:
    """Deploy one VM and let its guest write and verify every data disk."""
    calls = len(cloud.oned.calls)
    before = time.monotonic()
    cloud.oned.vm_deploy(row.vm, row.host, SYSTEM)
    row.deploy_s = sum(call.seconds for call in cloud.oned.calls[calls:] if call.action == "clone")
    guest = cloud.guest(row.vm)
    row.boot_s = time.monotonic() - before
    if row.persistent:
        guest.check("vdb", "data", 0, 256)
    for name in ("vda", "vdb"):
        offset = WROTE[0] if name == "vdb" else (VIRTUAL_MIB - 8) << 10
        guest.write(name, f"{row.name}-{name}", offset, WROTE[1])
        guest.check(name, f"{row.name}-{name}", offset, WROTE[1])
    row.store_read = copied([call.stderr for call in cloud.oned.calls[calls:]])
    read, written = guest_io(cloud, row)
    row.store_read += read
    row.store_written = written
    say(
        f"{row.name} on {row.host}: OS disk in {row.deploy_s:.2f} s, guest up and verified after "
        f"{time.monotonic() - before:.1f} s"
    )


def main() -> int:
    """Run the demo; the exit code tells whether every proof held."""
    say("a front-end and two hosts: namespaces with their own sshd, libvirtd and disks")
    with Cloud.up(hosts=2, installs=True) as cloud:
        say(
            f"lab is up, drivers installed; guests run under "
            f"{'KVM' if cloud.lab.virt == 'kvm' else 'TCG (KVM does not work here)'}"
        )
        os_image, data, copy = images(cloud)
        os_source = cloud.source(os_image)
        os_before = hashlib.sha256(cloud.lab.fe.path(os_source).read_bytes()).hexdigest()
        root = {"IMAGE_ID": str(os_image)}
        volatile = {"TYPE": "fs", "SIZE": "64", "FORMAT": "raw"}
        wanted = [
            ("first", "h1", [root, {"IMAGE_ID": str(data)}], True),
            ("second", "h1", [root, volatile], False),
            ("third", "h2", [root, {"IMAGE_ID": str(copy)}], True),
            ("fourth", "h2", [root, volatile], False),
        ]
        rows = []
        for name, host, disks, persistent in wanted:
            row = Row(name, cloud.create(name, disks), host, persistent)
            run_vm(cloud, row, disks)
            rows.append(row)
            for number in (0, 1):
                target = (
                    cloud.lab.node(host)
                    .run(["readlink", "-f", f"{cloud.vm_dir(row.vm)}/disk.{number}"])
                    .stdout.decode()
                )
                row.places.append("shared" if f"/{STORE}/" in target else "local")
        copy_s = full_copy(cloud, os_source)
        say(f"for comparison, the OS image in full through ssh: {copy_s:.2f} s")
        for row in rows:
            cloud.terminate(row.vm)
            say(f"{row.name} terminated")
        ok = cloud.leftovers() == []
        for row, image in ((rows[0], data), (rows[2], copy)):
            there = cloud.read(cloud.source(image), "raw", WROTE[1] << 10, WROTE[0] << 10) == content(
                f"{row.name}-vdb", *WROTE
            )
            row.proof = "its data is in the image" if there else "ITS DATA IS LOST"
            ok = ok and there
        same = hashlib.sha256(cloud.lab.fe.path(os_source).read_bytes()).hexdigest() == os_before
        ok = ok and same
        for row in (rows[1], rows[3]):
            row.proof = "gone, hosts are empty" if cloud.leftovers() == [] else "LEFTOVERS"
        show(rows, copy_s, same)
        return 0 if ok else 1


def show(rows: List[Row], copy_s: float, same: bool) -> None:
    """Print the table."""

    def mib(size: int) -> str:
        return f"{size / (1 << 20):.1f}"

    head = (
        "VM",
        "host",
        "OS disk",
        "data disk",
        "OS disk ready",
        "of a full copy",
        "store read",
        "store written",
        "afterwards",
    )
    lines = [head]
    for row in rows:
        kind = "persistent" if row.persistent else "volatile"
        lines.append(
            (
                row.name,
                row.host,
                f"{row.places[0]} (overlay)",
                f"{row.places[1]} ({kind})",
                f"{row.deploy_s:.2f} s",
                f"{100 * row.deploy_s / copy_s:.0f} %",
                f"{mib(row.store_read)} MiB",
                f"{mib(row.store_written)} MiB",
                row.proof,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    print()
    for number, line in enumerate(lines):
        print("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
    print(
        f"\nFull copy of the OS image through ssh: {copy_s:.2f} s. OS image "
        f"{'unchanged' if same else 'CHANGED'} at the end."
    )
    print("store read/written: our copies, and the hypervisor's block statistics of disks on the store.\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ActionFailed as e:
        sys.exit(f"demo: {e}")
