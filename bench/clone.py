# SPDX-License-Identifier: Apache-2.0
"""What a further disk of the same image costs: the clone action as oned runs it, in a lab of one host.

Against `ssh host qemu-img create` of the same overlay (the least any driver can do), against a full copy as
the stock ssh driver makes it (sparse tar through ssh) and scp, for images of three sizes, in turns.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from contextlib import contextmanager
from typing import Dict, Iterator, List, Tuple

import block
from figures import Figure, rounds_within
from inotify import Watch
from meter import Meter

from lab import moved
from lab.cloud import DATASTORES, RECORDS, STORE, SYSTEM, Cloud
from semishared.config import Config
from semishared.plan.image import placement

SIZES = {"16 MiB": 16, "256 MiB": 256, "1 GiB": 1024}
OPTIONS = placement.overlay_options(Config().overlays_options, max(SIZES.values()) << 20)
"""What the product gives an overlay of each of them."""
WARM_LIMIT = 3.0

SHARED = "/var/tmp/shared-ssh"
WRAPPER = f"""#!/bin/bash
exec /usr/bin/ssh -F {SHARED}/config -o ControlMaster=auto "$@"
"""
CONFIG = f"""Host *
  StrictHostKeyChecking accept-new
  ServerAliveInterval 10
  ControlMaster no
  ControlPersist 70s
  ControlPath {SHARED}/ctl-M-%C.sock
"""
"""What share/ssh of OpenNebula 7.4 makes of `ssh` for its drivers (bin/ssh, first in their PATH, and
etc/config), elsewhere.
"""

Samples = Dict[Tuple[str, str], List[float]]


def _image(cloud: Cloud, name: str, mib: int) -> int:
    path = cloud.upload_file(f"{name}.img")
    block.fill(path, mib << 20)
    cloud.give(path)
    image = cloud.oned.image_create(STORE, name, path=f"/var/tmp/{path.name}", type="OS", prefix="vd")
    path.unlink()
    return image


class Rig:
    """The cloud, its meter, and the programs to compare."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.host = cloud.lab.hosts[0]
        self.meter = Meter(cloud.lab, cloud.oned.settings.environment, record=False)
        cloud.oned.runner = cloud.oned.drivers.runner = self.meter

    def program(self, *argv: str) -> float:
        """Run a program on the front-end as a driver would be; return the seconds."""
        done, sample = self.meter.measure(argv, None, self.cloud.oned.settings.environment)
        if done.rc:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr}")
        return sample.wall

    @contextmanager
    def shared_ssh(self) -> Iterator[None]:
        """Let `ssh` be OpenNebula's wrapper, with one connection per host that stays, for drivers and
        programs in the block.
        """
        folder, environment = self.cloud.lab.fe.path(SHARED), self.cloud.oned.settings.environment
        folder.mkdir(exist_ok=True)
        for name, text in (("ssh", WRAPPER), ("config", CONFIG)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        os.chown(folder, self.cloud.lab.uid, self.cloud.lab.gid)
        path = environment["PATH"]
        environment["PATH"] = f"{SHARED}:{path}"
        try:
            # The first opens the connection that the others share.
            self.program("ssh", self.host.name, "true")
            yield
            if not list(folder.glob("ctl-M-*.sock")):
                raise RuntimeError("no connection was shared")
        finally:
            self.program("ssh", "-O", "exit", self.host.name)
            environment["PATH"] = path

    def clone(self, vm: int, image: int) -> float:
        """Run the clone action; return the seconds."""
        place = f"{self.host.name}:/var/lib/one//datastores/{SYSTEM}/{vm}/disk.0"
        words = ["clone", "semishared", f"fe:{self.cloud.source(image)}", place, str(vm), str(STORE)]
        self.cloud.oned.drivers.tm(words)
        return self.meter.samples["tm/clone"][-1].wall

    def delete(self, vm: int) -> None:
        """Remove the disk and the directory again, which releases the base."""
        place = f"{self.host.name}:/var/lib/one//datastores/{SYSTEM}/{vm}"
        self.cloud.oned.drivers.tm(["delete", "semishared", f"{place}/disk.0", str(vm), str(STORE)])
        self.cloud.oned.drivers.tm(["delete", "semishared", place, str(vm), str(SYSTEM)])

    def forget(self) -> None:
        """Empty the base store of the host."""
        shutil.rmtree(self.host.path(f"{DATASTORES}/{RECORDS}/bases"), ignore_errors=True)

    def base(self, image: int) -> str:
        """Return the path of an image's base on the host."""
        bases = self.host.path(f"{DATASTORES}/{RECORDS}/bases")
        (name,) = [path.name for path in bases.iterdir() if path.name.startswith(f"{STORE}-{image}-")]
        return f"{DATASTORES}/{RECORDS}/bases/{name}/image"

    def bare(self, image: int) -> float:
        """Make the same overlay by a bare ssh; return the seconds."""
        path = f"{DATASTORES}/{SYSTEM}/bare.qcow2"
        command = f"qemu-img create -q -f qcow2 -F raw -b {self.base(image)} -o {OPTIONS} {path}"
        seconds = self.program("ssh", self.host.name, command)
        self.host.path(path).unlink()
        return seconds

    def copy(self, image: int, how: str) -> float:
        """Make a full copy; return the seconds."""
        folder, name = os.path.split(self.cloud.source(image))
        target = f"{DATASTORES}/{SYSTEM}"
        if how == "tar":
            script = f"tar -C {folder} -cSf - {name} | ssh {self.host.name} 'tar -C {target} -xSf -'"
            seconds = self.program("bash", "-c", script)
        else:
            seconds = self.program("scp", "-q", f"{folder}/{name}", f"{self.host.name}:{target}/")
        self.host.path(f"{target}/{name}").unlink()
        return seconds

    def front_end_bytes(self) -> int:
        """Return the bytes that went over the front-end's network card."""
        for line in self.cloud.lab.fe.run(["cat", "/proc/net/dev"]).stdout.decode().splitlines():
            name, _, rest = line.partition(":")
            if name.strip() == "eth0":
                return int(rest.split()[0]) + int(rest.split()[8])
        raise RuntimeError("the front-end has no eth0")

    def store_read(self) -> int:
        """Return the bytes that the last clone says it read from the store."""
        last = [call for call in self.cloud.oned.calls if call.action == "clone" and call.kind == "tm"][-1]
        return moved.total(last.stderr, "store_read")


def _witness(rig: Rig, image: int, samples: Samples) -> None:
    """Deploy a VM from a warm base for real; who reads the image on the store would be seen by the kernel,
    too.
    """
    cloud = rig.cloud
    vm = cloud.create("witness", [{"IMAGE_ID": str(image)}])
    rig.forget()
    with Watch(cloud.lab.fe.path(cloud.source(image))) as watch:
        rig.clone(vm, image)
        if not watch.count()[1]:
            raise RuntimeError("a first clone was not seen to read the store: the witness is blind")
    rig.delete(vm)
    with Watch(cloud.lab.fe.path(cloud.source(image))) as watch:
        cloud.oned.vm_deploy(vm, rig.host.name, SYSTEM)
        virsh = ["virsh", "-q", "-c", "qemu:///system"]
        store = local = 0
        for line in rig.host.run([*virsh, "domblklist", f"one-{vm}"]).stdout.decode().splitlines():
            target, _, source = line.strip().partition(" ")
            text = rig.host.run([*virsh, "domblkstat", f"one-{vm}", target], check=False).stdout.decode()
            size = sum(int(value) for value in re.findall(r"rd_bytes (\d+)", text))
            if f"/{STORE}/" in source:
                store += size
            else:
                local += size
        cloud.terminate(vm)
        opens, reads = watch.count()
    samples["warm VM", "store by statistics"].append(store)
    samples["warm VM", "local by statistics"].append(local)
    samples["warm VM", "reads seen"].append(reads)
    samples["warm VM", "opens seen"].append(opens)


def clone(quick: bool) -> List[Figure]:
    """Compare a warm and a first clone with the least and with a full copy."""
    warm, cold = (2, 1) if quick else (10, 3)
    sizes = dict(list(SIZES.items())[:2]) if quick else SIZES
    samples: Samples = defaultdict(list)
    with Cloud.up(hosts=1) as cloud:
        rig = Rig(cloud)
        images = {size: _image(cloud, f"image-{mib}", mib) for size, mib in sizes.items()}
        vms = {
            size: cloud.create(f"vm-{image}", [{"IMAGE_ID": str(image)}]) for size, image in images.items()
        }
        print("  first clones and full copies", flush=True)
        for _ in rounds_within(45, cold):
            rig.forget()
            for size, image in images.items():
                samples[size, "first"].append(rig.clone(vms[size], image))
                samples[size, "first store read"].append(rig.store_read())
                rig.delete(vms[size])
                for how in ("tar", "scp"):
                    samples[size, how].append(rig.copy(image, how))
        print("  further clones", flush=True)
        for _ in rounds_within(40, warm):
            for size, image in images.items():
                before = rig.front_end_bytes()
                samples[size, "warm"].append(rig.clone(vms[size], image))
                samples[size, "network"].append((rig.front_end_bytes() - before) / 1024)
                samples[size, "store read"].append(rig.store_read())
                samples[size, "bare"].append(rig.bare(image))
                rig.delete(vms[size])
        print("  further clones through a connection that stays", flush=True)
        smallest = list(images)[0]
        with rig.shared_ssh():
            for _ in rounds_within(15, warm):
                samples[smallest, "shared warm"].append(rig.clone(vms[smallest], images[smallest]))
                samples[smallest, "shared bare"].append(rig.bare(images[smallest]))
                rig.delete(vms[smallest])
        _witness(rig, images[list(images)[-1]], samples)
    return _figures(list(images), samples)


def _figures(sizes: List[str], s: Samples) -> List[Figure]:
    found = []
    for size in sizes:
        found += [
            Figure(
                f"clone/warm/{size}",
                f"further clone of a {size} image",
                "s",
                s[size, "warm"],
                "`ssh host qemu-img create` of the same overlay",
                s[size, "bare"],
                expected=1.8,
                because="an interpreter on both sides, three questions to oned, fsync; ssh's own "
                "time is in both",
                budget=("ratio", "<=", WARM_LIMIT),
                budget_from="warm clone",
            ),
            Figure(
                f"clone/warm-against-copy/{size}",
                f"further clone of a {size} image",
                "s",
                s[size, "warm"],
                "full copy (sparse tar through ssh)",
                s[size, "tar"],
                paired=False,
                expected={"16 MiB": 1.2, "256 MiB": 0.3, "1 GiB": 0.1}[size],
                because="the copy grows with the data",
            ),
            Figure(
                f"clone/first/{size}",
                f"first clone of a {size} image on a host",
                "s",
                s[size, "first"],
                "full copy (sparse tar through ssh)",
                s[size, "tar"],
                expected={"16 MiB": 1.5, "256 MiB": 1.2, "1 GiB": 1.1}[size],
                because="reads the store once without ssh's cipher, but hashes and flushes every byte",
            ),
            Figure(
                f"clone/scp/{size}",
                f"scp of a {size} image",
                "s",
                s[size, "scp"],
                "full copy (sparse tar through ssh)",
                s[size, "tar"],
            ),
            Figure(
                f"clone/warm-store-bytes/{size}",
                f"read from the store by a further clone, {size} image",
                "bytes",
                s[size, "store read"],
                expected=0.0,
                because="the base is on the host",
                budget=("value", "<=", 0.0),
                budget_from="bytes per warm VM",
            ),
            Figure(
                f"clone/first-store-bytes/{size}",
                f"read from the store by a first clone, {size} image",
                "bytes",
                s[size, "first store read"],
            ),
            Figure(
                f"clone/warm-network/{size}",
                f"over the front-end's network per further clone, {size} image",
                "KiB",
                s[size, "network"],
                expected=15.0,
                because="the handshake of ssh, one plan, one answer",
            ),
        ]
    first, last = sizes[0], sizes[-1]
    found += [
        Figure(
            "clone/warm-shared",
            f"further clone of a {first} image through a connection that stays (OpenNebula's ssh)",
            "s",
            s[first, "shared warm"],
            "`ssh host qemu-img create` through the same connection",
            s[first, "shared bare"],
            expected=3.0,
            because="without ssh's handshake two interpreters are against one qemu-img",
            budget=("ratio", "<=", WARM_LIMIT),
            budget_from="warm clone",
            if_missed="two starts of Python, and what both sides import, are more than twice that command",
        ),
        Figure(
            "clone/size-independence",
            f"further clone of a {last} image",
            "s",
            s[last, "warm"],
            f"of a {first} image",
            s[first, "warm"],
            expected=1.0,
            because="nothing of it is read",
            budget=("ratio", "<=", 1.2),
            budget_from="independent of image size",
        ),
        Figure(
            "clone/warm-vm-store-bytes",
            "read from the store by a VM on a warm base, block statistics",
            "bytes",
            s["warm VM", "store by statistics"],
            expected=0.0,
            because="no disk of it lies there",
            budget=("value", "<=", 0.0),
            budget_from="bytes per warm VM",
        ),
        Figure(
            "clone/warm-vm-local-bytes",
            "read from the host's disk by the same VM (the control)",
            "bytes",
            s["warm VM", "local by statistics"],
        ),
        Figure(
            "clone/warm-vm-image-reads",
            "reads of the image on the store while that VM came and went (inotify)",
            "events",
            s["warm VM", "reads seen"],
            expected=0.0,
            because="no disk of it lies there",
            budget=("value", "<=", 0.0),
            budget_from="bytes per warm VM",
        ),
        Figure(
            "clone/warm-vm-image-opens",
            "opens of it meanwhile, without a read",
            "events",
            s["warm VM", "opens seen"],
            expected=1.0,
            because="a clone looks whether the content has changed: at size and times of the open file, "
            "which NFS has fresh then",
        ),
    ]
    return found
