# SPDX-License-Identifier: Apache-2.0
"""Jobs of the version before this one, killed in the midst, and what is to be true when this checkout's
version goes on with their VMs.

Each job is a generator: what is before its `yield` the older version does, which is killed at a point of its
own; what is after it, the newer one. From the kill on, all that the older version starts on that host is
killed at its first point, until the upgrade: it cannot put right what it has left.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import Any, Callable, Dict, Iterator, NamedTuple, Sequence

from lab import Lab
from lab.cloud import SYSTEM, Cloud
from lab.guest import METAL, Guest, content
from lab.oned import ActionFailed
from upgrade import versions
from upgrade.world import COMMAND, DATA, KIB, KINDS

PLACES: Dict[str, Dict[str, Any]] = {
    "in-place": {"persistent": True},
    "overlay": {},
    "copy": {"SEMISHARED_LOCAL": "copy"},
    "remote-first": {"SEMISHARED_LOCAL": "remote-first"},
    "store-clone": {"SEMISHARED_PLACE": "shared"},
    "diff": {"persistent": True, "SEMISHARED_PLACE": "local"},
    "memory": {"SEMISHARED_CLASS": "ram"},
    "volatile": {},
}
DIES_AT = "/var/tmp/dies-at"
DYING = f'''
try:
    with open("{DIES_AT}", encoding="utf-8") as _said:
        _last = _said.read()
except OSError:
    _last = ""


def is_on() -> bool:
    return bool(_last)


def point(name: str) -> None:
    if _last in (name, "*"):
        try:
            descriptor = os.open("{DIES_AT}", os.O_WRONLY | os.O_TRUNC)
            os.write(descriptor, b"*")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
'''
"""What the older version's own module of such points ends with here: a point is named, since which number it
has differs from run to run.
"""


def let_die(lab: Lab) -> None:
    """Have the older version, which is not installed yet, die where it is told to."""
    module = lab.fe.path(f"{versions.TREES[versions.KILLED]}/lib/semishared/tools/crash_points.py")
    module.write_text(module.read_text() + DYING)


class Row(NamedTuple):
    """A job on a VM with one disk of a place and format, and where it is killed: another point each turn."""

    job: str
    place: str
    format: str
    points: Sequence[str]
    dies: str = "h1"
    """The host of which the version is killed."""
    host: str = "h1"
    """Where the VM is then."""

    @property
    def name(self) -> str:
        return f"{self.job}-{self.place}-{self.format}"


class Killed:
    """The cloud, and what is to be gone on with, by row."""

    def __init__(self, cloud: Cloud, kind: str, turn: int) -> None:
        self.cloud, self.oned, self.kind, self.turn = cloud, cloud.oned, kind, turn
        self.store = KINDS[kind][0]
        self.vms: Dict[Row, int] = {}
        self.images: Dict[Row, int] = {}
        self.left: Dict[Row, Iterator[None]] = {}

    def create(self, row: Row) -> int:
        """Create a VM with the disk of a row and no other."""
        disk = {"TYPE": "fs", "SIZE": "16", "FORMAT": row.format}
        if row.place != "volatile":
            more = PLACES[row.place]
            self.images[row] = image = self.cloud.data_image(
                row.name, DATA, format=row.format, store=self.store, **more
            )
            disk = {"IMAGE_ID": str(image)}
        system = {"ARCH": "x86_64", "MACHINE": "pc", **METAL.os}
        vm = self.vms[row] = self.oned.vm_create(
            self.cloud.template(row.name, [disk], context=False, OS=system)
        )
        return vm

    def deploy(self, row: Row) -> int:
        """Deploy a VM that has written `one`."""
        vm = self.create(row)
        self.oned.vm_deploy(vm, row.host, SYSTEM)
        self.guest(row).write("vda", "one", 1024, KIB)
        return vm

    def guest(self, row: Row) -> Guest:
        return self.cloud.guest(self.vms[row])

    def kill(self, row: Row) -> None:
        """Have a job die where its row says."""
        self.left[row] = job = JOBS[row.job](self, row)
        next(job)

    @contextmanager
    def dying(self, row: Row) -> Iterator[None]:
        """Kill the older version on a host within the block; fail if it never came there.

        The block may succeed all the same: the guest of a migration may have moved by then.
        """
        point, node = row.points[self.turn % len(row.points)], self.cloud.lab.node(row.dies)
        file = node.path(DIES_AT)
        file.write_text(point)
        file.chmod(0o666)
        try:
            with suppress(ActionFailed, AssertionError):
                yield
            assert file.read_text() == "*", f"{row.name}: {row.dies} was never at {point!r}"
        finally:
            file.unlink()

    def command(self, *words: str) -> None:
        """Run `semishared`, which must be able to do what it is asked."""
        done = self.cloud.lab.fe.run([COMMAND, *words], check=False, timeout=300)
        assert done.returncode == 0, (done.stdout, done.stderr)

    def check(self, row: Row, seed: str) -> None:
        """See that the guest has what it wrote, and below that what its disk was made from."""
        guest = self.guest(row)
        guest.check("vda", seed, 1024, KIB)
        guest.check("vda", "zero" if row.place == "volatile" else "base", 0, KIB)

    def end(self, row: Row, seed: str) -> None:
        """See that a VM writes and can be terminated; what was to get into its image is there."""
        self.check(row, seed)
        self.guest(row).write("vda", "end", 2048, KIB)
        self.cloud.terminate(self.vms[row])
        if row.place in ("in-place", "diff"):
            self.check_stored(row, self.images[row], seed)
            assert self.stored(self.images[row], row.format, 2048) == content("end", 2048, KIB)

    def check_stored(self, row: Row, image: int, seed: str) -> None:
        assert self.stored(image, row.format, 0) == DATA
        assert self.stored(image, row.format, 1024) == content(seed, 1024, KIB)

    def stored(self, image: int, format: str, offset: int) -> bytes:
        """Return 64 KiB of what an image has in its store, at an offset in KiB."""
        if self.kind == "rbd":
            name = self.cloud.source(image).partition("/")[2]
            return self.cloud.lab.ceph.read(name, KIB << 10, offset << 10)
        return self.cloud.read(self.cloud.source(image), format, KIB << 10, offset << 10)

    def device(self, row: Row) -> str:
        """Return the device on which the disk of a row lies."""
        node = self.cloud.lab.node(row.host)
        path = f"{self.cloud.vm_dir(self.vms[row])}/disk.0"
        return node.run(["readlink", "-f", path]).stdout.decode().partition("/.semishared/")[0]


def clone(world: Killed, row: Row) -> Iterator[None]:
    """Killed while the disk is made; oned tries again."""
    vm = world.create(row)
    with world.dying(row):
        world.oned.vm_deploy(vm, row.host, SYSTEM)
    yield
    world.oned.vm_recover(vm, "retry")
    world.guest(row).write("vda", "one", 1024, KIB)
    world.end(row, "one")


def snapshot(world: Killed, row: Row) -> Iterator[None]:
    """Killed while a snapshot of a running VM is made; the disk is then reverted to another one."""
    vm = world.deploy(row)
    with world.dying(row):
        world.oned.disk_snapshot_create(vm, 0, "killed")
    yield
    world.check(row, "one")
    number = world.oned.disk_snapshot_create(vm, 0, "again")
    world.guest(row).write("vda", "two", 1024, KIB)
    world.oned.vm_poweroff(vm, hard=True)
    world.oned.disk_snapshot_revert(vm, 0, number)
    world.oned.vm_resume(vm)
    world.end(row, "one")


def unsnapshot(world: Killed, row: Row) -> Iterator[None]:
    """Killed while a snapshot is deleted; it is deleted once more."""
    vm = world.deploy(row)
    first, second = (_written(world, row, vm, seed) for seed in ("two", "three"))
    with world.dying(row):
        world.oned.disk_snapshot_delete(vm, 0, first)
    yield
    world.check(row, "three")
    world.oned.disk_snapshot_delete(vm, 0, first)
    world.oned.vm_poweroff(vm, hard=True)
    world.oned.disk_snapshot_revert(vm, 0, second)
    world.oned.vm_resume(vm)
    world.end(row, "two")


def pull(world: Killed, row: Row) -> Iterator[None]:
    """Killed while the latest snapshot is deleted, into which the guest writes."""
    vm = world.deploy(row)
    first, second = (_written(world, row, vm, seed) for seed in ("two", "three"))
    with world.dying(row):
        world.oned.disk_snapshot_delete(vm, 0, second)
    yield
    world.check(row, "three")
    world.oned.disk_snapshot_delete(vm, 0, second)
    world.oned.vm_poweroff(vm, hard=True)
    world.oned.disk_snapshot_revert(vm, 0, first)
    world.oned.vm_resume(vm)
    world.end(row, "one")


def _written(world: Killed, row: Row, vm: int, seed: str) -> int:
    """Take a snapshot and write on; return its number."""
    number = world.oned.disk_snapshot_create(vm, 0, seed)
    world.guest(row).write("vda", seed, 1024, KIB)
    return number


def save(world: Killed, row: Row) -> Iterator[None]:
    """Killed while a disk is saved as an image."""
    vm = world.deploy(row)
    before = set(world.oned.images)
    with world.dying(row):
        world.oned.disk_saveas(vm, 0, f"{row.name}-killed")
    for image in set(world.oned.images) - before:
        world.oned.image_delete(image)
    yield
    image = world.oned.disk_saveas(vm, 0, f"{row.name}-saved")
    world.check_stored(row, image, "one")
    world.oned.image_delete(image)
    world.end(row, "one")


def backup(world: Killed, row: Row) -> Iterator[None]:
    """Killed while a running VM's disks are copied for a backup."""
    vm = world.deploy(row)
    words = ("0", f"one-{vm}", "-", str(vm), str(SYSTEM))
    with world.dying(row):
        world.cloud.tm("prebackup_live", vm, *words)
    yield
    world.cloud.tm("prebackup_live", vm, *words)
    path, node = f"{world.cloud.vm_dir(vm)}/backup/disk.0.0", world.cloud.lab.node(row.host)
    assert world.cloud.read(path, "qcow2", KIB << 10, 1024 << 10, node=node) == content("one", 1024, KIB)
    world.cloud.tm("postbackup_live", vm, *words)
    world.end(row, "one")


def detach(world: Killed, row: Row) -> Iterator[None]:
    """Killed while a running VM's disk is detached from its store."""
    vm = world.deploy(row)
    with world.dying(row):
        world.command("detach", str(vm))
    yield
    world.check(row, "one")
    world.command("detach", str(vm))
    world.oned.vm_poweroff(vm)
    world.oned.vm_resume(vm)
    world.end(row, "one")


def commit(world: Killed, row: Row) -> Iterator[None]:
    """Killed while a running VM's disk is committed to its image."""
    vm = world.deploy(row)
    with world.dying(row):
        world.command("commit", str(vm))
    yield
    world.guest(row).write("vda", "two", 1024, KIB)
    world.command("commit", str(vm))
    world.check_stored(row, world.images[row], "two")
    world.end(row, "two")


def finish(world: Killed, row: Row) -> Iterator[None]:
    """Killed while the disk of a VM that ends gets into its image."""
    vm = world.deploy(row)
    with world.dying(row):
        world.cloud.terminate(vm)
    yield
    world.oned.vm_recover(vm, "retry")
    world.check_stored(row, world.images[row], "one")


def live(world: Killed, row: Row) -> Iterator[None]:
    """Killed while a VM moves to another host; it moves once more, and back."""
    vm = world.deploy(row)
    with world.dying(row):
        world.oned.vm_migrate(vm, "h2", how="live")
    yield
    world.check(row, "one")
    here = world.oned.vm(vm).last.host.name
    for host in ("h1" if here == "h2" else "h2", here):
        world.oned.vm_migrate(vm, host, how="live")
        world.check(row, "one")
    world.end(row, "one")


def move(world: Killed, row: Row) -> Iterator[None]:
    """Killed while a VM that is off moves to another host; oned tries again."""
    vm = world.deploy(row)
    world.oned.vm_poweroff(vm, hard=True)
    with world.dying(row):
        world.oned.vm_migrate(vm, "h2")
    yield
    world.oned.vm_recover(vm, "retry")
    world.oned.vm_resume(vm)
    world.end(row, "one")


def undeploy(world: Killed, row: Row) -> Iterator[None]:
    """Killed while a VM's files go to the front-end; oned tries again."""
    vm = world.deploy(row)
    with world.dying(row):
        world.oned.vm_undeploy(vm, hard=True)
    yield
    if world.oned.state(vm)[0] != "UNDEPLOYED":
        world.oned.vm_recover(vm, "retry")
    world.oned.vm_deploy(vm, "h1", SYSTEM)
    world.end(row, "one")


def device(world: Killed, row: Row) -> Iterator[None]:
    """Killed while the device of a running VM's disk is drained."""
    world.deploy(row)
    yield from _drained(world, row)
    world.end(row, "one")


def device_off(world: Killed, row: Row) -> Iterator[None]:
    """Killed while the device of the disk of a VM that is off is drained."""
    vm = world.deploy(row)
    world.oned.vm_poweroff(vm, hard=True)
    yield from _drained(world, row)
    world.oned.vm_resume(vm)
    world.end(row, "one")


def _drained(world: Killed, row: Row) -> Iterator[None]:
    where = world.device(row)
    with world.dying(row):
        world.command("pool", "drain", row.host, where)
    yield
    # What a killed move has left unlinked goes with the next move of that disk, or with gc.
    world.command("gc", "--now")
    world.command("pool", "drain", row.host, where)
    assert world.device(row) != where


JOBS: Dict[str, Callable[[Killed, Row], Iterator[None]]] = {
    "clone": clone,
    "snapshot": snapshot,
    "unsnapshot": unsnapshot,
    "pull": pull,
    "save": save,
    "backup": backup,
    "detach": detach,
    "commit": commit,
    "finish": finish,
    "live": live,
    "move": move,
    "undeploy": undeploy,
    "device": device,
    "device-off": device_off,
}
