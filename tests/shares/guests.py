# SPDX-License-Identifier: Apache-2.0
"""A small cloud whose hosts have a root of shares mounted, and guests that have shares."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Sequence

from lab import Node
from lab.cloud import SYSTEM, Cloud
from lab.guest import LINUX, Guest
from semishared.share import btrfs
from shares.cloud import SHARES, template
from shares.page import ROOT, rule

MOUNTED = "nosuid,nodev"
SUDOERS = "/etc/sudoers.d/shares"


COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
PROGRAM = "/var/tmp/one/lib/semishared/share/as_root.py"
"""Where hosts have what root copies."""


def give_program(host: Node) -> None:
    """Give root of a host its own copy of the program, as the page says."""
    there, name = os.path.split(btrfs.PROGRAM)
    script = (
        'mkdir -p /run/sbin; install -o root -g root -m 755 "$1" "/run/sbin/$3"; mount --bind /run/sbin "$2"'
    )
    host.run(["sh", "-euc", script, "sh", PROGRAM, there, name], user="root")


class Guests:
    """A cloud with a datastore SHARES, whose VMs have shares."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.oned, self.os = cloud, cloud.oned, cloud.os_image(system=LINUX)

    def image(self, name: str, size: str, uid: int = 0, **more: Any) -> int:
        """Make a share of user `uid`."""
        return self.oned.image_create(SHARES, name, path=f"new:{size}", type="FILESYSTEM", uid=uid, **more)

    def path(self, image: int, host: int = 0) -> Path:
        """Return where, seen from outside, a host has a share."""
        return self.cloud.lab.hosts[host].path(self.oned.image(image).source)

    def create(self, name: str, *images: int, **more: str) -> int:
        """Create a VM that boots, and has shares; the tag of each is its image's name."""
        tags = [
            {"IMAGE_ID": str(image), "MOUNT_TAG": self.oned.image(image).name, **more} for image in images
        ]
        return self.cloud.create(name, [{"IMAGE_ID": str(self.os)}, *tags])

    def deploy(self, name: str, *images: int, host: str = "h1", **more: str) -> int:
        """Create and deploy one."""
        vm = self.create(name, *images, **more)
        self.oned.vm_deploy(vm, host, SYSTEM)
        return vm

    def mounted(self, vm: int) -> Guest:
        """Return the verifier in a VM that has just booted, with its shares mounted at /TAG."""
        guest = self.cloud.guest(vm)
        for disk in self.oned.vm(vm).disks:
            if disk["TYPE"] == "FILESYSTEM":
                tag = disk["MOUNT_TAG"]
                code, said = guest.run(f"mkdir -p /{tag} && mount -t virtiofs {tag} /{tag}")
                assert code == 0, said
        return guest

    def daemons(self, host: int = 0) -> list[int]:
        """Return the processes of virtiofsd on a host, as it numbers them itself: two for each share."""
        done = self.cloud.lab.hosts[host].run(["pgrep", "-x", "virtiofsd"], user="root", check=False)
        return [int(number) for number in done.stdout.split()]

    def of_daemons(self, name: str, host: int = 0) -> list[str]:
        """Return what /proc says of each of those."""
        node = self.cloud.lab.hosts[host]
        return [
            node.run(["cat", f"/proc/{pid}/{name}"], user="root").stdout.decode()
            for pid in self.daemons(host)
        ]

    def says(self, *words: str, codes: Sequence[int] = (0,)) -> Any:
        """Run `semishared ... --json` on the front-end; return what it says."""
        done = self.cloud.lab.fe.run([COMMAND, *words, "--json"], check=False, timeout=120)
        assert done.returncode in codes, done
        return json.loads(done.stdout)


class Shares(Guests):
    """Datastore SHARES of a cloud, on a btrfs that both of its hosts have; h1 makes the shares."""

    def __init__(self, cloud: Cloud, device: str) -> None:
        self.device = device
        for host in cloud.lab.hosts:
            self.mount(host)
            host.path(SUDOERS).write_text(rule("oneadmin"))
            give_program(host)
        h1 = cloud.lab.hosts[0]
        h1.run(["chown", "oneadmin:", ROOT], user="root")
        h1.run(["chmod", "711", ROOT], user="root")
        # It may have been the root of another cloud.
        h1.run(["rm", "-rf", f"{ROOT}/.semishared"], user="root")
        cloud.oned.datastore_create(template("btrfs", Path(ROOT), BRIDGE_LIST="h1"), SHARES)
        cloud.lab.fe.run([COMMAND, "share", "init", str(SHARES)])
        super().__init__(cloud)

    @classmethod
    @contextmanager
    def up(cls, device: str) -> Iterator[Shares]:
        """Put up a cloud of two hosts, which mount the btrfs on `device`."""
        with Cloud.up(hosts=2, forks=True) as cloud:
            yield cls(cloud, device)

    def clear(self) -> None:
        """Remove what the tests of a file have left, if one of them has failed, so that the next file is
        judged for itself.
        """
        self.cloud.delete_all()
        for image in [image.id for image in self.oned.images.values() if image.datastore_id == SHARES]:
            self.oned.image_delete(image)

    def mount(self, host: Node, options: str = MOUNTED) -> None:
        """Mount the root of shares on a host."""
        major, minor = os.major(os.stat(self.device).st_rdev), os.minor(os.stat(self.device).st_rdev)
        script = 'mkdir -p "$1"; [ -e "$2" ] || mknod "$2" b $3 $4; mount -t btrfs -o "$5" "$2" "$1"'
        host.run(
            ["sh", "-euc", script, "sh", ROOT, self.device, str(major), str(minor), options], user="root"
        )
