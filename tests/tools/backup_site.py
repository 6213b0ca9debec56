# SPDX-License-Identifier: Apache-2.0
"""A VM that is off, and its backups as OpenNebula's rsync and restic drivers keep them.

The executables of this checkout, what rsync, restic and qemu-img do with their files, a simulated oned. What
the guest writes is written by qemu-io to the disk's active layer.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator, List, Tuple, Type
from unittest import mock

from increments.stores import PASSWORD, Rsync
from lab.caches import HERE as LAB
from lab.oned.objects import Datastore, Image
from tools.oned_site import HERE, ROOT, STORE, SYSTEM, ActionSite
from tools.test_gc_clouds import at_rest

MiB = 1 << 20
REPOSITORY, BACKUP = 107, 900
POWEROFF = 8
SIZE = 8
OVERLAY, IN_PLACE, RAW = 0, 1, 2
"""The disks: an overlay over a raw image, a persistent image in qcow2, a raw copy, of which increments are
whole.
"""
Held = Dict[int, bytes]


class Backups:
    """A VM that is off, what its disks hold, and its backups in a datastore."""

    def __init__(self, site: ActionSite, kind: Type[Rsync]) -> None:
        self.site = site
        images = (
            site.image("base"),
            site.image("mine", format="qcow2", persistent=True),
            site.image("copy", SEMISHARED_LOCAL="copy"),
        )
        self.vm = site.vm(*images)
        at_rest(site, self.vm, POWEROFF)
        for disk, action in enumerate(("clone", "ln", "clone")):
            site.make(action, self.vm, disk)
        first = bytearray(SIZE * MiB)
        first[MiB : MiB + 65536] = b"\xa1" * 65536
        self.holds = {disk: bytearray(first) for disk in (OVERLAY, IN_PLACE, RAW)}
        self.held: List[Held] = []
        """By increment, what the disks held then."""
        base = site.location / str(REPOSITORY)
        base.mkdir()
        self.store = kind(base, self.vm)
        self.directory = site.system / str(self.vm)
        self.mode = "INCREMENT"

    def format(self, disk: int) -> str:
        return "raw" if disk == RAW else "qcow2"

    def write(self, pattern: int, at: int, count: int = 128) -> None:
        """Write to each disk, offset and count in KiB."""
        for disk, holds in self.holds.items():
            words = ["-f", self.format(disk), "-c", f"write -q -P {pattern} {at}k {count}k"]
            subprocess.run(["qemu-io", *words, str(self.site.disk(self.vm, disk))], check=True)
            holds[at * 1024 : (at + count) * 1024] = bytes([pattern]) * (count * 1024)

    def grow(self, disk: int, mib: int) -> None:
        datastore = STORE if disk == IN_PLACE else SYSTEM
        path = f"{HERE}:{self.site.disk(self.vm, disk)}"
        self.site.tm("resize", path, mib, self.vm, datastore)
        row = self.site.oned.vm(self.vm).disk(disk)
        assert row
        row["SIZE"] = str(mib)
        self.holds[disk].extend(bytes(mib * MiB - len(self.holds[disk])))

    # -- backups ----------------------------------------------------------------------------------

    @property
    def xml(self) -> str:
        goes_on = self.store.chain and self.mode == "INCREMENT"
        last = max(self.store.chain) if goes_on else -1
        image = BACKUP if goes_on else -1
        config = f"<MODE>{self.mode}</MODE><LAST_INCREMENT_ID>{last}</LAST_INCREMENT_ID>"
        config += f"<INCREMENTAL_BACKUP_ID>{image}</INCREMENTAL_BACKUP_ID>"
        ids = f"<BACKUP_IDS>{f'<ID>{BACKUP}</ID>' if goes_on else ''}</BACKUP_IDS>"
        said = f"<BACKUPS><BACKUP_CONFIG>{config}</BACKUP_CONFIG>{ids}</BACKUPS>"
        xml = self.site.oned.vm(self.vm).to_xml()
        return xml.replace("<BACKUPS><BACKUP_CONFIG/><BACKUP_IDS></BACKUP_IDS></BACKUPS>", said)

    def _call(self, action: str) -> None:
        disks = ":".join(map(str, self.holds))
        words = (f"{HERE}:{self.directory}", disks, f"one-{self.vm}", "-", self.vm, SYSTEM)
        self.site.tm(action, *words, stdin=self.xml)

    def back_up(self, *, stores: bool = True) -> None:
        """Make a backup, which the datastore gets unless it fails (`stores`)."""
        self._call("prebackup")
        if stores:
            self.store.keep(len(self.held), self.directory / "backup")
            self.held.append({disk: bytes(holds) for disk, holds in self.holds.items()})
        self._call("postbackup")
        assert not (self.directory / "backup").exists()

    # -- restores ---------------------------------------------------------------------------------

    @contextmanager
    def known(self) -> Iterator[None]:
        """Let oned know the backup."""
        oned, base = self.site.oned, str(self.store.base)
        oned.datastores[REPOSITORY] = Datastore(
            REPOSITORY, "repository", 3, self.store.driver, "-", base, {"TYPE": "BACKUP_DS"}
        )
        last = list(self.store.chain.values())[-1]
        oned.images[BACKUP] = Image(
            BACKUP,
            "backup",
            6,
            False,
            REPOSITORY,
            "repository",
            {},
            source=last,
            format="raw",
            vms=[self.vm],
            increments=dict(self.store.chain),
        )
        try:
            yield
        finally:
            del oned.datastores[REPOSITORY], oned.images[BACKUP]

    def restore(self, increment: int, disk: int = -1) -> None:
        """As `onevm restore`: disks of the VM itself."""
        words = (f"{HERE}:{self.directory}", self.vm, BACKUP, increment, disk)
        with self.known():
            self.site.tm("restore", *words)

    def check(self, wanted: Held) -> None:
        """See what the VM's disks hold."""
        for disk, holds in wanted.items():
            assert content(self.site.disk(self.vm, disk), self.format(disk)) == holds, f"disk {disk}"

    def listed(self, increment: int) -> Dict[int, str]:
        """Return the URLs of an increment's disks, as they are given to images that are restored of it."""
        xml = "".join(
            (
                self.site.oned.datastores[REPOSITORY].to_xml(),
                self.site.oned.images[BACKUP].to_xml(),
                f"<TEMPLATE><INCREMENT_ID>{increment}</INCREMENT_ID></TEMPLATE>",
            )
        )
        program = self.remotes / "datastore" / self.store.driver / "ls"
        said = subprocess.run(
            [program, "-i", str(increment)],
            input=f"<DS_DRIVER_ACTION_DATA>{xml}</DS_DRIVER_ACTION_DATA>".encode(),
            check=True,
            stdout=subprocess.PIPE,
            env=self.environment,
        )
        return {int(disk): url for disk, url in json.loads(said.stdout).items()}

    @property
    def remotes(self) -> Path:
        return self.site.top / "fe/var/lib/one/remotes"

    @property
    def environment(self) -> Dict[str, str]:
        return {**os.environ, **self.site.oned.runner.extra}  # type: ignore[attr-defined]

    def uploaded(self, url: str) -> Tuple[Path, str]:
        """Return path and format of the image that `cp` makes of a disk in the backup."""
        store = self.site.oned.datastores[STORE].to_xml()
        image = f"<IMAGE><ID>999</ID><UID>0</UID><GID>0</GID><TYPE>0</TYPE><PATH>{url}</PATH>"
        image += f"<TEMPLATE><FROM_BACKUP_DS>{REPOSITORY}</FROM_BACKUP_DS></TEMPLATE></IMAGE>"
        done = subprocess.run(
            [self.remotes / "datastore/semishared/cp", "999"],
            input=base64.b64encode(f"<DS_DRIVER_ACTION_DATA>{image}{store}</DS_DRIVER_ACTION_DATA>".encode()),
            capture_output=True,
            check=False,
            env=self.environment,
        )
        assert done.returncode == 0, done.stderr.decode()
        source, format = done.stdout.decode().split()
        return Path(source), format

    def check_image(self, increment: int, disk: int) -> None:
        """See that an image of a disk in an increment holds what the disk held then."""
        with self.known():
            source, format = self.uploaded(self.listed(increment)[disk])
        assert content(source, format) == self.held[increment][disk], (increment, disk)

    def check_all(self) -> None:
        """See that each increment that is left is what the downloader sends, of every disk."""
        for increment in self.store.chain:
            with self.known():
                urls = self.listed(increment)
            assert set(urls) == set(self.holds)
            for disk, url in urls.items():
                sent = self.site.top / "sent"
                program = self.remotes / "datastore/downloader.sh"
                subprocess.run([program, "--nodecomp", url, sent], check=True, env=self.environment)
                assert content(sent, "qcow2") == self.held[increment][disk], (increment, disk)


def content(path: Path, format: str) -> bytes:
    raw = path.parent / "content"
    subprocess.run(["qemu-img", "convert", "-f", format, "-O", "raw", path, raw], check=True)
    found = raw.read_bytes()
    raw.unlink()
    return found


@contextmanager
def backups(top: Path, kind: Type[Rsync]) -> Iterator[Backups]:
    """Yield a VM on a site that has what our drivers call of OpenNebula's."""
    # restic finds nothing of another run's there, and nothing of this run stays.
    more = {"RESTIC_PASSWORD": PASSWORD, "RESTIC_CACHE_DIR": str(top / "cache")}
    with mock.patch.dict(os.environ, more), ActionSite.up(top / "one") as site:
        remotes = site.top / "fe/var/lib/one/remotes"
        for name in ("downloader.sh", "chain_downloader", "rsync", "restic"):
            (remotes / "datastore" / name).symlink_to(LAB / "stock/datastore" / name)
        (remotes / "lib").unlink()
        shutil.copytree(ROOT / "lib", remotes / "lib", ignore=shutil.ignore_patterns("__pycache__"))
        # restore asks libvirt whether the VM runs.
        (remotes / "etc/vmm/kvm").mkdir(parents=True)
        (remotes / "etc/vmm/kvm/kvmrc").write_text("LIBVIRT_URI=test:///default\n")
        runner = site.oned.runner
        runner.extra.update(more)  # type: ignore[attr-defined]
        # Programs of backup drivers are looked for beside the executable's own library.
        runner.through = []  # type: ignore[attr-defined]
        yield Backups(site, kind)
