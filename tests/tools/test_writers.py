# SPDX-License-Identifier: Apache-2.0
"""Two writers of one image: refused where the first can be seen, by QEMU's own locks and by Ceph's; nobody
else is.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator

import pytest

from semishared.errors import SemisharedError
from semishared.model import steps as s
from semishared.model.store import image_steps as i
from semishared.store import writers
from tools.test_datastore import Store
from tools.world import World, qemu_io

if TYPE_CHECKING:
    from tools.ceph_site import Site


@contextmanager
def exported(path: str, format: str, *, writable: bool = True) -> Iterator[int]:
    """Have a QEMU hold an image open as a guest's would."""
    with tempfile.TemporaryDirectory() as top:
        argv = [
            "qemu-storage-daemon",
            "--blockdev",
            f"driver=file,node-name=file,filename={path}",
            "--blockdev",
            f"driver={format},node-name=disk,file=file,read-only={'off' if writable else 'on'}",
            "--nbd-server",
            f"addr.type=unix,addr.path={top}/nbd",
            "--pidfile",
            f"{top}/pid",
            "--export",
            f"type=nbd,id=export,node-name=disk,writable={'on' if writable else 'off'}",
        ]
        with subprocess.Popen(argv) as process:
            try:
                deadline = time.monotonic() + 20
                # Written when all the rest has been done.
                while not os.path.exists(f"{top}/pid"):
                    assert time.monotonic() < deadline and process.poll() is None
                    time.sleep(0.01)
                yield process.pid
            finally:
                process.kill()


@pytest.mark.fault(12, "an image that a QEMU writes to is attached to no other guest")
@pytest.mark.parametrize("format", ["raw", "qcow2"])
def test_file_that_somebody_writes_to_is_not_attached(world: World, format: str) -> None:
    image, disk = world.image(format=format), world.disk()
    world.link(image, world.disk(vm=4))
    session = world.store / ".semishared/image/session"
    before = session.read_text()
    with exported(image.source, format) as pid:
        with pytest.raises(SemisharedError) as caught:
            world.link(image, disk)
        assert caught.value.id == "SS079"
        assert f"process {pid} on {os.uname().nodename}" in caught.value.detail
        assert session.read_text() == before, "the writer's session goes on"
        assert not os.path.lexists(disk.path)
    world.link(image, disk)
    qemu_io(disk.path, format, "read -P 0xa1 1M 64k")
    assert session.read_text() != before


def test_the_domain_of_a_writer_is_named(world: World) -> None:
    """By what libvirt starts QEMU with."""
    image = world.image()
    argv = [
        "qemu-system-x86_64",
        "-name",
        "guest=one-77,debug-threads=on",
        "-machine",
        "pc",
        "-accel",
        "tcg",
        "-m",
        "32",
        "-nodefaults",
        "-display",
        "none",
        "-S",
        "-qmp",
        "unix:qmp,server=on,wait=off",
        "-drive",
        f"if=virtio,format=raw,file={image.source}",
    ]
    with subprocess.Popen(argv, cwd=world.top) as process:
        try:
            deadline = time.monotonic() + 20
            with socket.socket(socket.AF_UNIX) as monitor:
                while monitor.connect_ex(f"{world.top}/qmp"):
                    assert time.monotonic() < deadline and process.poll() is None
                    time.sleep(0.02)
                monitor.settimeout(20)
                # Its greeting comes from a thread of its own: what answers a command has opened all.
                monitor.sendall(b'{"execute": "qmp_capabilities"}')
                said = b""
                while b'"return"' not in said:
                    said += monitor.recv(4096)
            with pytest.raises(SemisharedError, match="domain one-77: `virsh destroy one-77` ends it"):
                world.link(image, world.disk())
        finally:
            process.kill()


@contextmanager
def hung(path: Path) -> Iterator[None]:
    """Have a file lie on a file system that hangs, and a process that has it open."""
    path.touch()
    own = os.stat(path).st_dev
    words = [
        "--blockdev",
        "driver=null-co,node-name=none,size=4096",
        "--export",
        f"type=fuse,id=it,node-name=none,mountpoint={path}",
    ]
    with subprocess.Popen(["qemu-storage-daemon", *words]) as daemon:
        deadline = time.monotonic() + 20
        while os.stat(path).st_dev == own:
            assert daemon.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        # Nobody else may have it open: what closes it, as a program does that is started, hangs too.
        with subprocess.Popen(
            ["sh", "-c", 'exec 3<"$0"; echo open; exec sleep 100', path], stdout=subprocess.PIPE
        ) as user:
            assert user.stdout and user.stdout.readline() == b"open\n"
            daemon.send_signal(signal.SIGSTOP)
            try:
                time.sleep(1.2)  # what the kernel was told of the file holds for a second
                yield
            finally:
                daemon.send_signal(signal.SIGCONT)
                user.kill()
        daemon.terminate()


def test_a_file_on_a_store_that_hangs_holds_up_no_question_about_another(
    world: World, tmp_path: Path
) -> None:
    image = world.image()
    ask = "import sys; from semishared.store import writers; print(writers.of_disk(sys.argv[1]))"
    with hung(tmp_path / "hung"), exported(image.source, "raw") as pid:
        said = subprocess.run(
            [sys.executable, "-c", ask, image.source],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    assert f"is written to by process {pid} on" in said


def test_readers_shareable_and_readonly_disks_are_not_refused(world: World) -> None:
    image = world.image(format="qcow2")
    with exported(image.source, "qcow2", writable=False):
        world.link(image, world.disk(vm=4))
    with exported(image.source, "qcow2"):
        world.link(image, world.disk(vm=5), readonly=True)
        disk = world.disk(vm=6)
        world.on(s.PrepareVm(6, disk.vm_dir), s.LinkInPlace(disk, image, False, session=True, shareable=True))
        # As premigrate: the guest runs, and writes, where it comes from.
        disk = world.disk(vm=7)
        world.on(s.PrepareVm(7, disk.vm_dir), s.LinkInPlace(disk, image, False, session=False))


@pytest.mark.fault(12, "an image that a QEMU writes to is not reverted or flattened under it")
@pytest.mark.parametrize("action", ["snap_revert", "snap_flatten"])
def test_image_that_somebody_writes_to_is_not_reverted(tmp_path: Path, action: str) -> None:
    store = Store(tmp_path)
    source = str(store.base / "image")
    for path, fill in ((source, b"now"), (f"{source}.snap/0", b"then")):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(fill.ljust(1 << 20, b"."))
    words: dict[str, Any] = {"SOURCE": source, "FORMAT": "raw", "SIZE": "1", "TARGET_SNAPSHOT": "0"}
    with exported(source, "raw"):
        done = store.run(action, **words)
        assert (done.returncode, done.stdout) == (1, b"")
        assert b"is written to by process" in done.stderr and b"SS079" in done.stderr
        assert (store.base / "image").read_bytes().startswith(b"now")
    store.ok(action, **words)
    assert (store.base / "image").read_bytes().startswith(b"then")


# -- on a real Ceph cluster -------------------------------------------------------------------------

CLIENT = """
import sys, rados, rbd
cluster = rados.Rados(conffile=sys.argv[1], rados_id="libvirt")
cluster.connect(timeout=20)
how = sys.argv[3]
image = rbd.Image(cluster.open_ioctx("one"), sys.argv[2], read_only=how == "read")
if how == "write":
    image.write(b"x" * 512, 0)
    image.flush()
image.read(0, 512)
print("open", flush=True)
sys.stdin.read()
image.close()
"""


@contextmanager
def client(site: Site, name: str, how: str) -> Iterator[subprocess.Popen[bytes]]:
    """Have an image open as guests do: `write` has written, `open` could, `read` may not."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, site.conf, name, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout and process.stdout.readline().startswith(b"open")
        yield process
    finally:
        process.communicate(timeout=20)


@pytest.mark.fault(12, "an RBD image whose exclusive lock somebody holds is attached to no other guest")
def test_image_whose_lock_somebody_holds_is_not_attached(site: Site) -> None:
    image = site.make()
    with client(site, "one-7", "write"):
        began = time.monotonic()
        with pytest.raises(SemisharedError) as caught:
            site.on(i.BeginSession(image, readonly=False))
        assert caught.value.id == "SS079"
        assert time.monotonic() - began < writers.WATCH_S - 5, "it answers, so nobody waits for its end"
        (watcher,) = site.busy()["one-7"]
        assert f"at {watcher}" in caught.value.detail and "client." in caught.value.detail
        assert "semishared fence HOST" in caught.value.detail and "blocklist add" not in caught.value.detail
        site.on(i.BeginSession(image, readonly=True))


def test_clients_that_only_watch_or_read_are_not_refused_but_named(site: Site) -> None:
    image = site.make()
    with client(site, "one-7", "read"):
        (begun,) = site.on(i.BeginSession(image, readonly=False))
        assert begun["open_by"] == []
    with client(site, "one-7", "open"):
        (begun,) = site.on(i.BeginSession(image, readonly=False))
        assert [who.rpartition(" ")[2] for who in begun["open_by"]] == site.busy()["one-7"]


@pytest.mark.long
def test_lock_of_a_dead_client_holds_nobody_up_for_longer_than_its_watch(site: Site) -> None:
    image = site.make()
    with client(site, "one-7", "write") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    began = time.monotonic()
    site.on(i.BeginSession(image, readonly=False))
    assert time.monotonic() - began < writers.WATCH_S + 20
    site.write("one-7", 0, b"y")


def test_lock_that_was_taken_by_hand_is_not_overlooked(site: Site) -> None:
    image = site.make()
    subprocess.run(["rbd", "-c", site.conf, "--id", "admin", "lock", "add", "one/one-7", "mine"], check=True)
    with pytest.raises(SemisharedError, match="locked by hand, by client"):
        site.on(i.BeginSession(image, readonly=False))
