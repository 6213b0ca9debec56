# SPDX-License-Identifier: Apache-2.0
"""Retry and overlap as oned does it: a table, each row on real hosts, stores and disks."""

from __future__ import annotations

import hashlib
import json
import os
import time
from typing import Callable, Dict, Iterator, List, Sequence, Tuple

import pytest

from lab import Node
from lab.oned import ActionFailed, LabRunner, Settings
from lab.oned.drivers import Drivers

from . import conftest
from .cloud import BASES, STORE, SYSTEM, Cloud
from .rig import image_bytes
from .test_faults import HOST_LIMIT_S, overlap

VM = 7
CONTENT = image_bytes("retry")
DATA = image_bytes("retry-data")
WRITTEN = bytearray(CONTENT)
WRITTEN[64 << 10 : 128 << 10] = b"\x5a" * (64 << 10)
KERNEL = b"kernel" * 1000
SAVED = f"{STORE}/saved"
UNDEPLOYED, RESIZE_OFF, RUNNING, PROLOG_MIGRATE = 67, 63, 3, 8
Line = Tuple[str, List[str]]
State = Dict[str, Tuple[str, ...]]


class Site:
    """The cloud, the images and the lines that oned writes for VM 7."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.os = cloud.upload(CONTENT)
        self.data = cloud.upload(DATA)
        cloud.image(1)
        cloud.image(4, persistent=True)
        self.knows(RUNNING)
        path = cloud.fe.path(f"{STORE}/kernel")
        path.write_bytes(KERNEL)
        script = cloud.fe.path("/var/tmp/context.sh")
        script.write_text("SEMI=retry\n")
        for file in (path, script):
            os.chmod(file, 0o644)

    def knows(self, lcm_state: int) -> None:
        """Let oned know VM 7: a disk in place, an overlay, two volatile disks."""
        self.lcm_state = lcm_state
        self.cloud.vm(VM, {0: 4, 1: 1, 2: -1, 3: -1, 5: 1}, lcm_state=lcm_state)

    # -- sequences, as in the recordings ------------------------------------------------------------

    @staticmethod
    def disk(host: str, number: object) -> str:
        return f"{host}:{SYSTEM}/{VM}/disk.{number}"

    def deploy(self, host: str = "h1") -> List[Line]:
        return [
            ("ln", [f"fe:{self.data}", self.disk(host, 0), str(VM), "100"]),
            ("clone", [f"fe:{self.os}", self.disk(host, 1), str(VM), "100"]),
            ("mkimage", ["8", "raw", self.disk(host, 2), str(VM), "101"]),
            ("mkswap", ["8", self.disk(host, 3), str(VM), "101"]),
            ("clone", [f"fe:{STORE}/kernel", f"{host}:{SYSTEM}/{VM}/kernel", str(VM), "100"]),
            ("clone", [f"fe:{STORE}/kernel", f"{host}:{SYSTEM}/{VM}/initrd", str(VM), "100"]),
            ("context", ["/var/tmp/context.sh", self.disk(host, 4), str(VM), "101"]),
        ]

    def attach(self, host: str = "h1") -> List[Line]:
        return [("clone", [f"fe:{self.os}", self.disk(host, 5), str(VM), "100"])]

    def detach(self, host: str = "h1") -> List[Line]:
        return [("delete", [self.disk(host, 5), str(VM), "100"])]

    def move(self, source: str, target: str) -> List[Line]:
        lines = [("mv", [self.disk(source, n), self.disk(target, n), str(VM), "100"]) for n in range(4)]
        return [*lines, ("mv", [f"{source}:{SYSTEM}/{VM}", f"{target}:{SYSTEM}/{VM}", str(VM), "101"])]

    def terminate(self, host: str = "h1") -> List[Line]:
        return [("mvds", [self.disk(host, 0), self.data, str(VM), "100"]), *self.delete(host)[1:]]

    def delete(self, host: str = "h1") -> List[Line]:
        lines = [("delete", [self.disk(host, n), str(VM), "100" if n < 2 else "101"]) for n in range(4)]
        return [*lines, ("delete", [f"{host}:{SYSTEM}/{VM}", str(VM), "101"])]

    def save_as(self, host: str = "h1") -> List[Line]:
        return [("cpds", [self.disk(host, 1), SAVED, "-1", str(VM), "100"])]

    # -- doing ----------------------------------------------------------------------------------------

    def do(self, lines: Sequence[Line]) -> None:
        """Run lines as one_tm does; each must succeed."""
        for action, words in lines:
            state = self.lcm_state
            if action == "mv":
                self.knows(PROLOG_MIGRATE)
            done = self.cloud.tm(action, *words)
            self.knows(state)
            assert done.returncode == 0, f"{action} {' '.join(words)}: {done.stderr.decode()}"

    def write(self, host: str = "h1") -> None:
        """Write to the overlay, as the guest would."""
        node = self.cloud.lab.node(host)
        path = json.loads(node.path(f"{SYSTEM}/{VM}/.semishared/disk.1.json").read_text())["path"]
        node.run(["qemu-io", "-f", "qcow2", "-c", "write -q -P 0x5a 64k 64k", path])

    def clean(self) -> None:
        """Take the VM away where there is anything of it: that nothing is removed twice, the sequences
        prove.
        """
        for host in ("h1", "h2", "fe"):
            if self.cloud.left_of(VM, self.cloud.node(host)):
                self.do([*self.delete(host)[-1:]])
        self.cloud.fe.run(["rm", "-f", SAVED])
        assert not self.cloud.left_of(VM)

    def guest(self, host: str, disk: int) -> bytes:
        """Return what the guest reads."""
        node = self.cloud.lab.node(host)
        record = json.loads(node.path(f"{SYSTEM}/{VM}/.semishared/disk.{disk}.json").read_text())
        return self.cloud.guest_sees(node, record["path"], record["format"])

    def state(self) -> State:
        """List what there is of the VM on all machines and in the store, with content."""
        found: State = {}
        for node in (self.cloud.h1, self.cloud.h2, self.cloud.fe):
            for top in (f"{SYSTEM}/{VM}", BASES):
                found.update(listing(node, top))
        found["saved"] = (
            (digest(self.cloud.fe.path(SAVED).read_bytes()),) if self.cloud.fe.path(SAVED).exists() else ()
        )
        found["image"] = (digest(self.cloud.fe.path(self.data).read_bytes()),)
        return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def listing(node: Node, top: str) -> State:
    """List a directory of a node: links with their targets, files with their content (not of what is
    random).
    """
    found: State = {}
    start = node.path(top)
    for folder, folders, names in os.walk(start):
        if folder.endswith(("/locks", "/holders")):
            continue
        for name in sorted([*folders, *names]):
            path = f"{folder}/{name}"
            shown = f"{node.name}:{top}/{os.path.relpath(path, start)}"
            if os.path.islink(path):
                found[shown] = ("link", os.readlink(path))
            elif os.path.isdir(path):
                found[shown] = ("directory",)
            elif name in ("disk.3", "disk.4"):
                found[shown] = ("file", str(os.path.getsize(path)))
            else:
                with open(path, "rb") as file:
                    found[shown] = ("file", digest(file.read()))
    return found


@pytest.fixture(scope="module")
def site(forking_cloud: Cloud) -> Iterator[Site]:
    made = Site(forking_cloud)
    yield made
    made.clean()


@pytest.fixture(autouse=True)
def row(request: pytest.FixtureRequest, site: Site) -> Iterator[None]:
    """Each row starts without the VM; what came of it goes into the table."""
    site.knows(RUNNING)
    site.clean()
    table = conftest.figures.setdefault("retry", {})
    name = request.node.name.partition("test_")[2]
    table[name] = "failed"
    started = time.monotonic()
    yield
    report = getattr(request.node, "called", None)
    if report is not None and report.passed:
        table[name] = f"passed ({time.monotonic() - started:.0f} s)"


# -- sequences ----------------------------------------------------------------------------------------

Before = Callable[[Site], None]


def deployed(site: Site) -> None:
    site.do(site.deploy())
    site.write()


def attached(site: Site) -> None:
    deployed(site)
    site.do(site.attach())


def stopped(site: Site) -> None:
    deployed(site)
    site.do(site.move("h1", "fe"))


SEQUENCES: Dict[str, Tuple[Before, Callable[[Site], List[Line]]]] = {
    "deploy": (lambda site: None, lambda site: site.deploy()),
    "attach": (deployed, lambda site: site.attach()),
    "detach": (attached, lambda site: site.detach()),
    "stop": (deployed, lambda site: site.move("h1", "fe")),
    "resume": (stopped, lambda site: site.move("fe", "h2")),
    "migrate": (deployed, lambda site: site.move("h1", "h2")),
    "terminate": (deployed, lambda site: site.terminate()),
    "terminate when undeployed": (stopped, lambda site: site.terminate("fe")),
    "delete": (deployed, lambda site: site.delete()),
    "saveas": (deployed, lambda site: site.save_as()),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence(site: Site, name: str) -> None:
    """Each line twice in a row; and all from line 1 after a failure at line 1, then 2, then 3 ... (recover
    --retry).
    """
    before, lines_of = SEQUENCES[name]
    before(site)
    lines = lines_of(site)
    site.do(lines)
    wanted = site.state()
    site.clean()
    before(site)
    site.do([line for line in lines for _ in range(2)])
    assert site.state() == wanted, "each line twice"
    if len(lines) == 1:
        return
    site.clean()
    before(site)
    for last in range(1, len(lines) + 1):
        # The moves of disks do nothing: whichever fails, the next run is the same.
        if lines[last - 1][0] != "mv" or last in (1, len(lines)):
            site.do(lines[:last])
    site.do(lines)
    assert site.state() == wanted, "again from line 1"


def test_each_snapshot_and_resize_twice(site: Site) -> None:
    """oned sends these once; a driver that was thought dead, or an operator, may send them again."""

    def on(disk: int, action: str, number: int) -> Line:
        return action, [site.disk("h1", disk), str(number), str(VM), "100" if disk < 2 else "101"]

    def all_of_them(times: int) -> State:
        deployed(site)
        for disk in (0, 1):
            site.do([on(disk, "snap_create", 0)] * times)
            if disk:
                site.write()
            site.do([on(disk, "snap_create", 1)] * times)
            site.do([on(disk, "snap_revert", 0)] * times)
            site.do([on(disk, "snap_delete", 1)] * times)
        for disk in (0, 1, 2):
            site.do([on(disk, "resize", 16)] * times)
        found = site.state()
        site.clean()
        # The image is the VM's own only as long as that lives.
        site.cloud.fe.run(["truncate", "-s", str(len(DATA)), site.data])
        site.cloud.fe.run(["rm", "-r", f"{site.data}.snap"])
        return found

    site.knows(RESIZE_OFF)
    assert all_of_them(2) == all_of_them(1)


# -- where oned is wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "host"), [("terminate", "alive"), ("delete", "alive"), ("terminate", "dead")]
)
def test_stopped_vm_ended_on_its_last_host(site: Site, lines: str, host: str) -> None:
    """EPILOG retry, and delete of an undeployed VM: oned names h1, all is on the front-end."""
    stopped(site)
    assert site.guest("fe", 0) == DATA
    if host == "dead":
        site.cloud.h1.kill()
    try:
        for action, words in getattr(site, lines)():
            started = time.monotonic()
            site.do([(action, words)])
            assert time.monotonic() - started < HOST_LIMIT_S
    finally:
        if host == "dead":
            site.cloud.h1.start()
    assert not site.cloud.left_of(VM)
    assert site.cloud.fe.path(site.data).read_bytes() == DATA


def test_terminate_retried_on_the_wrong_host_after_each_line(site: Site) -> None:
    stopped(site)
    for last in range(1, 5):
        site.do(site.terminate("fe")[:last])
        site.do(site.terminate("h1")[:last])
    site.do(site.terminate("h1"))
    assert not site.cloud.left_of(VM)
    assert site.cloud.fe.path(site.data).read_bytes() == DATA


def test_saveas_of_an_undeployed_vm(site: Site) -> None:
    stopped(site)
    site.knows(UNDEPLOYED)
    before = site.state()
    site.do(site.save_as("fe"))
    assert site.cloud.guest_sees(site.cloud.fe, SAVED, "raw") == bytes(WRITTEN)
    after = site.state()
    new = {path for path in after.keys() - before.keys() if after[path][0] != "directory"}
    assert not new, f"a borrowed base stays: {new}"


def test_recreate_with_the_same_ids(site: Site) -> None:
    """recover --recreate: cleaned up without mvds, then a fresh prolog, elsewhere or on the same host."""
    for old, new in (("h1", "h2"), ("h2", "h2")):
        site.do(site.deploy(old))
        site.write(old)
        site.do(site.delete(old))
        site.do(site.deploy(new))
        assert site.guest(new, 1) == CONTENT
        assert site.guest(new, 0) == DATA
        site.clean()


def test_recreate_while_the_old_host_kept_its_files(site: Site) -> None:
    site.do(site.deploy("h1"))
    site.write("h1")
    site.do(site.deploy("h1"))
    assert site.guest("h1", 1) == CONTENT, "what the guest of the VM before wrote is still there"


# -- overlap, names -----------------------------------------------------------------------------------


def test_clone_overlapping_its_own_delete(site: Site) -> None:
    for held in ("base-100-1", f"vm-{VM}"):
        site.cloud.h1.run(["find", BASES, "-mindepth", "2", "-path", "*/bases/*", "-delete"], check=False)
        words = site.deploy()[1][1]
        done = overlap(site.cloud, "clone", words, held, VM)
        left = site.cloud.left_of(VM)
        assert not left, f"{held}: {done.stderr.decode()} {left}"


@pytest.mark.parametrize(
    "suffix", ["semishared", *(pytest.param(other, marks=pytest.mark.long) for other in ("ceph", "ssh"))]
)
def test_suffix_of_another_disk(site: Site, suffix: str) -> None:
    """oned never clears the suffix between disks: any action may come with ours or a foreign one."""
    settings = Settings(front_end="fe")
    drivers = Drivers(settings, LabRunner(site.cloud.fe, settings.environment, 120))
    for lines in (
        site.deploy(),
        site.save_as(),
        site.move("h1", "fe"),
        site.move("fe", "h1"),
        site.terminate(),
    ):
        for action, words in lines:
            assert not site.cloud.fe.path(f"/var/lib/one/remotes/tm/semishared/{action}.{suffix}").exists()
            drivers.tm([f"{action.upper()}.{suffix}", "semishared", *words], any_driver=True)
    assert not site.cloud.left_of(VM)
    assert site.cloud.guest_sees(site.cloud.fe, SAVED, "raw") == CONTENT


def test_kernel_and_initrd(site: Site) -> None:
    site.do(site.deploy())
    for name in ("kernel", "initrd"):
        assert site.cloud.h1.path(f"{SYSTEM}/{VM}/{name}").read_bytes() == KERNEL
    site.do(site.move("h1", "h2"))
    assert site.cloud.h2.path(f"{SYSTEM}/{VM}/kernel").read_bytes() == KERNEL


def test_mv_of_a_disk_that_does_not_exist(site: Site) -> None:
    """TYPE=FILESYSTEM: nobody made a disk, the resume moves it all the same (CONTRACT pitfall 35)."""
    stopped(site)
    site.do([("mv", [site.disk("fe", 9), site.disk("h1", 9), str(VM), "101"])])
    site.do(site.move("fe", "h1"))
    assert site.guest("h1", 1) == bytes(WRITTEN)


def test_failures_of_the_drivers_are_seen_by_this_table(site: Site) -> None:
    with pytest.raises(AssertionError):
        site.do([("clone", [f"fe:{STORE}/nothing", site.disk("h1", 1), str(VM), "100"])])
    with pytest.raises(ActionFailed):
        settings = Settings(front_end="fe")
        drivers = Drivers(settings, LabRunner(site.cloud.fe, settings.environment, 120))
        drivers.tm(
            ["clone", "semishared", f"fe:{STORE}/nothing", site.disk("h1", 1), str(VM), "100"],
            any_driver=True,
        )
