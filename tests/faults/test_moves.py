# SPDX-License-Identifier: Apache-2.0
"""`tm/mv` on real hosts, when it is cut, retried, done twice at once, or not wanted any more: no VM's disk is
lost.
"""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import Iterator, List, Tuple

import pytest

from lab import Node

from .cloud import STORE, SYSTEM, Cloud, one_line, until
from .rig import image_bytes

VM = 7
CONTENT = image_bytes("moves")
PROLOG_MIGRATE, RUNNING = 8, 3
KVMRC = "/var/tmp/one/etc/vmm/kvm/kvmrc"
OTHER = SYSTEM.replace("/101", "/103")
WRITE = "write -q -P 0x5a 64k 64k"
READ = "read -q -P 0x5a 64k 64k"


class Site:
    """VM 7 on h1, with an overlay that was written to and a volatile disk."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        cloud.image(1)
        self.source = cloud.upload(CONTENT)
        self.knows()

    def knows(self, lcm_state: int = PROLOG_MIGRATE, seq: int = 1) -> None:
        """Let oned know VM 7, on its way."""
        self.cloud.vm(VM, {0: -1, 1: 1}, lcm_state=lcm_state, seq=seq)

    def deploy(self) -> None:
        volatile = ("mkimage", "8", "raw", f"h1:{SYSTEM}/{VM}/disk.0", str(VM), "101")
        for words in (volatile, ("clone", *self.cloud.clone_words(self.source, VM, 1))):
            done = self.cloud.tm(*words)
            assert done.returncode == 0, done.stderr.decode()
        self.cloud.h1.run(["qemu-io", "-f", "qcow2", "-c", WRITE, f"{SYSTEM}/{VM}/disk.1"])
        self.cloud.h1.run(["qemu-io", "-f", "raw", "-c", WRITE, f"{SYSTEM}/{VM}/disk.0"])

    def words(self, target: str = f"h2:{SYSTEM}") -> List[str]:
        return [f"h1:{SYSTEM}/{VM}", f"{target}/{VM}", str(VM), "101"]

    def move(self, target: str = f"h2:{SYSTEM}") -> subprocess.CompletedProcess[bytes]:
        return self.cloud.tm("mv", *self.words(target))

    @staticmethod
    def is_whole(node: Node, system: str = SYSTEM) -> bool:
        """Tell whether a node has the VM, with all that it wrote."""
        pairs: List[Tuple[str, str]] = [("raw", "disk.0"), ("qcow2", "disk.1")]
        reads = [
            ["qemu-io", "-r", "-f", format, "-c", READ, f"{system}/{VM}/{name}"] for format, name in pairs
        ]
        return all(node.run(words, check=False).returncode == 0 for words in reads)

    def clean(self) -> None:
        self.knows()
        for node in (self.cloud.h1, self.cloud.h2):
            node.run(["sh", "-c", f"rm -rf {SYSTEM}/{VM} {SYSTEM}/.*-{VM}* {OTHER} {KVMRC}"])
        for host in ("h1", "h2"):
            self.cloud.delete(VM, host, ())
        self.cloud.forget(VM)


@pytest.fixture(scope="module")
def site(cloud: Cloud) -> Site:
    return Site(cloud)


@pytest.fixture(autouse=True)
def _deployed(site: Site) -> Iterator[None]:
    site.deploy()
    yield
    site.clean()


CUT = """
import os, sys, time
while os.path.lexists(sys.argv[1]):
    time.sleep(0.0005)
for word in sorted(os.listdir("/proc")):
    try:
        words = open(f"/proc/{word}/cmdline").read().split("\\0") if word.isdigit() else []
        if words[0] == "rm" or any(name.endswith("semishared/hostside.py") for name in words):
            os.kill(int(word), 9)
    except (OSError, IndexError):
        pass
"""
"""Kills our host side, and the rm it runs, as soon as a file is gone from its place."""


# -- cut and retried ----------------------------------------------------------------------------------


@pytest.mark.fault(1, "a move whose removal of the source was cut off is retried and loses nothing")
def test_removal_cut_midway_then_retried(site: Site) -> None:
    h1, h2 = site.cloud.h1, site.cloud.h2
    # Enough to remove that it can be cut.
    h1.run(
        [
            "python3",
            "-c",
            f"import os\nfor n in range(9000): os.close(os.open('{SYSTEM}/{VM}/deployment.%d' % "
            f"n, os.O_CREAT))",
        ]
    )
    killer = h1.popen(["python3", "-c", CUT, f"{SYSTEM}/{VM}/disk.0"])
    first = site.move()
    assert first.returncode != 0, first.stderr.decode()
    assert site.is_whole(h2), first.stderr.decode()
    killer.wait(timeout=60)
    done = site.move()
    assert site.is_whole(h2), "the retry has put what was left of the source in the place of the whole"
    assert done.returncode == 0, done.stderr.decode()
    assert site.cloud.left_of(VM, h1) == []
    assert not [path for path in site.cloud.left_of(VM, h2) if "/." in path.replace("/.semishared", "")]


@pytest.mark.fault(1, "one empty directory where the source was does not replace the whole VM")
def test_empty_directory_at_the_source_of_a_retried_rename(site: Site) -> None:
    h1 = site.cloud.h1
    h1.run(["mkdir", "-p", OTHER])
    assert site.move(f"h1:{OTHER}").returncode == 0
    assert site.is_whole(h1, OTHER)
    for retry in ("gone", "empty"):
        if retry == "empty":
            h1.run(["mkdir", f"{SYSTEM}/{VM}"])
        done = site.move(f"h1:{OTHER}")
        assert site.is_whole(h1, OTHER), retry
        assert done.returncode == 0, done.stderr.decode()
        assert not h1.path(f"{SYSTEM}/{VM}").exists()


@pytest.mark.fault(1, "a remainder with records, as 0.1.0 left it, is refused and nothing is removed")
def test_remainder_of_an_older_removal_is_refused(site: Site) -> None:
    h1, h2 = site.cloud.h1, site.cloud.h2
    h1.run(["cp", "-a", f"{SYSTEM}/{VM}", "/var/tmp/remainder"])
    assert site.move().returncode == 0
    h2.run(["rm", "-f", f"{SYSTEM}/{VM}/.semishared/vm.json"])
    h1.run(["mv", "/var/tmp/remainder", f"{SYSTEM}/{VM}"])
    h1.run(["rm", "-r", f"{SYSTEM}/{VM}/disk.0", f"{SYSTEM}/{VM}/.semishared/disk.0.json"])
    done = site.move()
    assert site.is_whole(h2)
    one_line(done, "SS063", "disk.0")
    assert h1.path(f"{SYSTEM}/{VM}/disk.1").is_symlink()


# -- one directory under two names --------------------------------------------------------------------


@contextmanager
def shared(site: Site, *places: Tuple[Node, str]) -> Iterator[None]:
    """Have one directory of the store in several places, with what h1 has in its system datastore."""
    site.cloud.h1.run(["cp", "-a", SYSTEM, f"{STORE}/export"])
    mounted = []
    try:
        for node, path in places:
            node.run(["mkdir", "-p", path])
            node.run(["mount", "--bind", f"{STORE}/export", path], user="root")
            mounted.append((node, path))
        yield
    finally:
        for node, path in mounted:
            node.run(["umount", "--lazy", path], user="root")
        site.cloud.h1.run(["rm", "-rf", f"{STORE}/export"])


@pytest.mark.fault(2, "a system datastore that two hosts share: a move between them removes nothing")
def test_move_between_hosts_that_share_the_directory(site: Site) -> None:
    h1, h2 = site.cloud.h1, site.cloud.h2
    with shared(site, (h1, SYSTEM), (h2, SYSTEM)):
        done = site.move()
        assert site.is_whole(h1)
        assert done.returncode == 0, done.stderr.decode()
        assert b"WARN: mv: " in done.stderr
        assert b"are one directory" in done.stderr
        assert not [
            name
            for name in h1.run(["ls", "-A", SYSTEM, f"{SYSTEM}/{VM}"]).stdout.split()
            if name.startswith(b".staged-")
        ]


@pytest.mark.fault(2, "a move to the same directory under another path is refused")
def test_move_to_the_same_directory_under_another_path(site: Site) -> None:
    h1, h2 = site.cloud.h1, site.cloud.h2
    with shared(site, (h1, SYSTEM), (h2, OTHER)):
        done = site.move(f"h2:{OTHER}")
        assert site.is_whole(h1)
        one_line(done, "SS065", "are one directory")


# -- not wanted any more ------------------------------------------------------------------------------


DOMAINS = (
    "<node><domain "
    "type='test'><name>one-7</name><memory>8192</memory><os><type>hvm</type></os></domain></node>"
)


@pytest.mark.fault(3, "the source is kept where the VM runs again, in the libvirt that LIBVIRT_URI names")
@pytest.mark.parametrize("libvirt", ["runs it", "cannot be asked"])
def test_source_is_kept_while_the_vm_may_run_there(site: Site, libvirt: str) -> None:
    h1, h2 = site.cloud.h1, site.cloud.h2
    path = "/var/tmp/domains.xml" if libvirt == "runs it" else "/no/such/file"
    h1.path("/var/tmp/domains.xml").write_text(DOMAINS)
    h1.run(["chmod", "644", "/var/tmp/domains.xml"], user="root")
    h1.run(["sh", "-c", f"mkdir -p $(dirname {KVMRC}); echo 'export LIBVIRT_URI=test://{path}' > {KVMRC}"])
    done = site.move()
    assert site.is_whole(h1), "its guest writes there"
    assert site.is_whole(h2)
    assert done.returncode == 0, done.stderr.decode()
    assert b"WARN: mv: " in done.stderr
    assert b"is kept" in done.stderr


@pytest.mark.fault(3, "oned has moved on while the move went on: the source is kept")
def test_source_is_kept_when_oned_has_moved_on(site: Site) -> None:
    """recover --failure stops no driver: what it was moving is the VM's again."""
    h1, h2 = site.cloud.h1, site.cloud.h2
    # More than fits between the hosts: it cannot have been sent while the target waits.
    h1.run(["sh", "-c", f"head -c 64M /dev/urandom >{SYSTEM}/{VM}/large"])
    site.cloud.wait_for_no_hostside(h2)
    with site.cloud.held(h2, "vm-7"):
        driver = site.cloud.start("mv", *site.words())
        site.cloud.wait_for_hostside(h2)
        site.knows(RUNNING, 2)
    _, err = driver.communicate(timeout=60)
    assert site.is_whole(h1)
    assert driver.returncode == 1, err.decode()
    assert b"not under way any more" in err
    assert not h2.path(f"{SYSTEM}/{VM}").exists()


@pytest.mark.fault(
    3, "oned cannot be asked whether the move is still wanted: both are kept, and it is no failure"
)
def test_source_is_kept_when_oned_does_not_answer(site: Site) -> None:
    h1, h2 = site.cloud.h1, site.cloud.h2
    site.cloud.wait_for_no_hostside(h2)
    with site.cloud.held(h2, "vm-7"):
        driver = site.cloud.start("mv", *site.words())
        site.cloud.wait_for_hostside(h2)
        del site.cloud.answers.texts["vm", VM]
    _, err = driver.communicate(timeout=60)
    assert site.is_whole(h1)
    assert site.is_whole(h2)
    assert driver.returncode == 0, err.decode()
    assert b"is kept: oned cannot be asked" in err
    site.knows()
    # What was kept is older than the VM's next stay there, and gives way to it.
    h2.run(["qemu-io", "-f", "raw", "-c", "write -q -P 0x77 1M 64k", f"{SYSTEM}/{VM}/disk.0"])
    site.knows(seq=2)
    back = site.cloud.tm("mv", f"h2:{SYSTEM}/{VM}", f"h1:{SYSTEM}/{VM}", str(VM), "101")
    assert back.returncode == 0, back.stderr.decode()
    h1.run(["qemu-io", "-r", "-f", "raw", "-c", "read -q -P 0x77 1M 64k", f"{SYSTEM}/{VM}/disk.0"])
    assert not h2.path(f"{SYSTEM}/{VM}").exists()


# -- two at once --------------------------------------------------------------------------------------


@pytest.mark.fault(4, "of two moves at once to one host, neither removes what the other is receiving")
def test_two_moves_at_once(site: Site) -> None:
    """The one that began first fails, after the other has begun: the other succeeds all the same."""
    h1, h2 = site.cloud.h1, site.cloud.h2
    # More than the pipes on the way hold.
    h1.run(["dd", "if=/dev/urandom", f"of={SYSTEM}/{VM}/large", "bs=1M", "count=60", "status=none"])
    stopped: List[str] = []
    drivers = []
    for _ in range(2):
        stopper = site.cloud.stopped(h1, "tar", stopped)
        drivers.append(site.cloud.start("mv", *site.words()))
        stopped.append(stopper.communicate()[0].decode().strip())
        assert stopped[-1], "no tar at work"
        until(
            lambda: bool(h2.run(["pgrep", "-x", "tar"], check=False).stdout), 20, "a tar at the target", 0.01
        )
    h1.run(["kill", "-CONT", stopped[0]])
    drivers[0].communicate(timeout=60)
    h1.run(["kill", "-CONT", stopped[1]])
    _, err = drivers[1].communicate(timeout=60)
    assert drivers[1].returncode == 0, err.decode()
    assert site.is_whole(h2)
    assert not h1.path(f"{SYSTEM}/{VM}").exists()
    assert not [path for path in site.cloud.left_of(VM, h2) if "/.incoming" in path or "/.removed" in path]


# -- to another datastore -----------------------------------------------------------------------------


@contextmanager
def other_file_system(node: Node, size: str) -> Iterator[None]:
    """Have a file system of its own in the place of the other datastore."""
    node.run(["mkdir", "-p", OTHER])
    node.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "other", OTHER], user="root")
    try:
        yield
    finally:
        node.wait_for(["umount", OTHER], 30, user="root")


def test_datastore_on_another_file_system_then_another_host_and_datastore_at_once(site: Site) -> None:
    h1, h2 = site.cloud.h1, site.cloud.h2
    with other_file_system(h1, "200m"):
        done = site.move(f"h1:{OTHER}")
        assert done.returncode == 0, done.stderr.decode()
        assert site.is_whole(h1, OTHER)
        assert not h1.path(f"{SYSTEM}/{VM}").exists()
        site.knows(seq=2)
        done = site.cloud.tm("mv", f"h1:{OTHER}/{VM}", f"h2:{SYSTEM}/{VM}", str(VM), "101")
        assert done.returncode == 0, done.stderr.decode()
        assert site.is_whole(h2)
        assert not h1.path(f"{OTHER}/{VM}").exists()


def test_datastore_without_room_is_refused_and_left_as_it_was(site: Site) -> None:
    h1 = site.cloud.h1
    with other_file_system(h1, "100k"):
        one_line(site.move(f"h1:{OTHER}"), "SS030")
        assert [name for name in h1.run(["ls", "-A", OTHER]).stdout.decode().split() if str(VM) in name] == []
    assert site.is_whole(h1)


@pytest.mark.parametrize("target", [f"h1:{OTHER}", f"h2:{SYSTEM}"])
def test_directory_of_another_driver_is_not_taken_for_ours(site: Site, target: str) -> None:
    h1 = site.cloud.h1
    h1.run(["mv", f"{SYSTEM}/{VM}/.semishared", "/var/tmp/records"])
    done = site.move(target)
    h1.run(["mv", "/var/tmp/records", f"{SYSTEM}/{VM}/.semishared"])
    one_line(done, "has no records of ours")
    assert site.is_whole(h1)
    for node in (h1, site.cloud.h2):
        for system in (OTHER, SYSTEM):
            assert (node, system) == (h1, SYSTEM) or not node.path(f"{system}/{VM}").exists()
