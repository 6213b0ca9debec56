# SPDX-License-Identifier: Apache-2.0
"""What comes from outside is judged where nobody else can change it, and is never more than was approved.

The executables of this checkout on files that change under them and on servers that lie; and the host side,
on images that no upload of ours has seen.
"""

from __future__ import annotations

import bz2
import gzip
import http.server
import lzma
import os
import resource
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

from rot import dated
from semishared.errors import SemisharedError
from semishared.model import steps as s
from tools.test_datastore import ROOT, Store
from tools.world import MiB, World, allocated, lay_over, qemu_io

SECRET = b"the front-end's secret".ljust(MiB, b".")


@pytest.fixture()
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def qcow2_over(path: Path, backing: Path) -> Path:
    """Make a qcow2 that reads what is in another file."""
    path.unlink(missing_ok=True)
    return lay_over(path, backing)


def names_another_file(path: object) -> bool:
    return bool(int.from_bytes(Path(str(path)).read_bytes()[8:16], "big"))


# -- what is checked is what is used


def swapping(top: Path, target: Path, evil: Path) -> str:
    """Return a PATH on which qemu-img comes after `target` has become `evil`, as if their owner had done that
    at this moment.
    """
    directory = top / "bin"
    directory.mkdir()
    program = directory / "qemu-img"
    program.write_text(f'#!/bin/sh\ncat "{evil}" > "{target}"\nexec /usr/bin/qemu-img "$@"\n')
    program.chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


@pytest.mark.fault(6, "an upload swapped after it was looked at brings no other file's bytes into the store")
def test_file_that_is_swapped_after_it_was_looked_at(store: Store, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    path = store.image(format="qcow2", size=MiB * 8)
    before = path.read_bytes()
    store.path = swapping(tmp_path, path, qcow2_over(tmp_path / "evil", secret))
    done = store.run("cp", PATH=path, SIZE=8)
    assert names_another_file(path), "nobody ran qemu-img: the file was not swapped"
    assert done.returncode == 0, done.stderr.decode()
    source, format = done.stdout.decode().split()
    assert not names_another_file(source)
    assert (Path(source).read_bytes(), format) == (before, "qcow2")


def test_image_that_is_swapped_while_it_is_cloned(store: Store, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    path, _ = store.cp(store.image(format="qcow2", size=MiB * 8))
    store.path = swapping(tmp_path, path, qcow2_over(tmp_path / "evil", secret))
    done = store.run("clone", PATH=path, FORMAT="qcow2", SIZE=8)
    assert names_another_file(path), "nobody ran qemu-img: the image was not swapped"
    assert done.returncode == 0, done.stderr.decode()
    assert not names_another_file(done.stdout.decode().split()[0])


ON_HOST: dict[str, Callable[[World, s.ImageRef, s.DiskRef], object]] = {
    "base staged": lambda world, image, disk: world.on(s.StageBase(str(world.root), image)),
    "linked": lambda world, image, disk: world.link(image, disk),
    "cloned on the store": lambda world, image, disk: world.on(
        s.PrepareVm(disk.vm, disk.vm_dir), s.CloneOnStore(disk, image, 0)
    ),
    "copied": lambda world, image, disk: world.on(
        s.PrepareVm(disk.vm, disk.vm_dir), s.CopyImage(disk, image, 0)
    ),
}


@pytest.mark.fault(6, "an image with a backing file that no upload saw is refused wherever it is opened")
@pytest.mark.parametrize("way", ON_HOST)
def test_image_with_a_backing_file_in_the_store_is_refused(world: World, tmp_path: Path, way: str) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    evil = qcow2_over(world.store / "evil", tmp_path / "secret")
    disk = world.disk()
    with pytest.raises(SemisharedError) as caught:
        ON_HOST[way](world, s.ImageRef(100, 9, "qcow2", str(evil)), disk)
    assert caught.value.id == "SS021"
    assert "a backing file" in caught.value.detail
    assert not os.path.lexists(disk.path)
    assert world.bases() == []
    assert world.leftovers() == []


@pytest.mark.parametrize("way", ON_HOST)
def test_image_that_is_no_qcow2_is_not_opened_as_one(world: World, way: str) -> None:
    image = world.image(size=2 * MiB)
    with pytest.raises(SemisharedError) as caught:
        ON_HOST[way](world, image._replace(format="qcow2"), world.disk())
    assert caught.value.id == "SS075"
    assert "raw" in caught.value.detail


@pytest.mark.parametrize("way", ON_HOST)
def test_raw_image_may_look_like_anything(world: World, tmp_path: Path, way: str) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    path = qcow2_over(world.store / "guest's", tmp_path / "secret")
    ON_HOST[way](world, s.ImageRef(100, 9, "raw", str(path)), world.disk())


def test_base_that_is_there_is_not_looked_at_again(world: World, tmp_path: Path) -> None:
    image = world.image(format="qcow2")
    world.clone(image, world.disk())
    (tmp_path / "secret").write_bytes(SECRET)
    stat_before = os.stat(image.source)
    with open(image.source, "r+b") as file:
        file.seek(8)
        file.write(struct.pack(">QI", 400, 20))
    dated(Path(image.source), stat_before)
    world.clone(image, world.disk(6))


def test_saved_disk_is_looked_at_again(world: World, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    image, disk = world.image(format="qcow2", size=2 * MiB), world.disk()
    world.link(image, disk)
    shutil.copyfile(qcow2_over(tmp_path / "evil", tmp_path / "secret"), image.source)
    saved = world.store / "saved"
    with pytest.raises(SemisharedError) as caught:
        world.on(s.SaveDisk(disk, str(saved), "raw", ""))
    assert caught.value.id == "SS021"
    assert not saved.exists()


@pytest.mark.parametrize("action", ["snap_revert", "snap_flatten"])
def test_image_is_not_reverted_to_what_names_other_files(store: Store, tmp_path: Path, action: str) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    source, _ = store.cp(store.image(format="qcow2", size=MiB * 8))
    before = source.read_bytes()
    (store.base / f"{source.name}.snap").mkdir()
    words = [
        "-o",
        f"data_file={tmp_path}/secret,data_file_raw=on",
        str(store.base / f"{source.name}.snap" / "0"),
        str(MiB),
    ]
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *words], check=True)
    store.fails(action, "SS021", "a data file", SOURCE=source, FORMAT="qcow2", SIZE=8, TARGET_SNAPSHOT=0)
    assert source.read_bytes() == before


# -- never more than was approved


class Server(http.server.BaseHTTPRequestHandler):
    """A server that is not well disposed; what it does, the path says."""

    bodies: dict[str, bytes] = {}

    def log_message(self, *_args: object) -> None:
        pass

    def do_GET(self) -> None:
        kind = self.path.split("?")[0].lstrip("/")
        try:
            self.send_response(200)
            getattr(self, kind, self.body)(kind)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def body(self, kind: str) -> None:
        self.send_header("Content-Length", str(len(self.bodies[kind])))
        self.end_headers()
        self.wfile.write(self.bodies[kind])

    def drips(self, _kind: str) -> None:
        """A byte from time to time."""
        self.end_headers()
        while True:
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.2)

    def endless(self, _kind: str) -> None:
        """No length, and no end within reason."""
        self.end_headers()
        for _ in range(200):
            self.wfile.write(os.urandom(65536) * 16)

    def zeros(self, _kind: str) -> None:
        self.end_headers()
        for _ in range(300):
            self.wfile.write(bytes(MiB))

    def claims_less(self, _kind: str) -> None:
        """HEAD and the first answer say 1 MiB; what comes then is more."""
        self.send_header("Content-Length", str(100 * MiB))
        self.end_headers()
        for _ in range(100):
            self.wfile.write(os.urandom(65536) * 16)

    def claims_more(self, _kind: str) -> None:
        self.send_header("Content-Length", str(1 << 62))
        self.end_headers()
        self.wfile.write(bytes(1000))


@pytest.fixture()
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.fault(8, "a download larger than the SIZE that oned approved is refused")
@pytest.mark.parametrize("kind", ["endless", "claims_less"])
def test_download_beyond_what_was_approved_is_refused(store: Store, server: str, kind: str) -> None:
    store.fails("cp", "SS072", "was approved", PATH=f"{server}/{kind}", SIZE=1)


def test_endless_zeros_are_too_much_as_well(store: Store, server: str) -> None:
    store.fails("cp", "SS072", PATH=f"{server}/zeros", SIZE=1)


def test_length_that_nobody_can_store_is_refused(store: Store, server: str) -> None:
    store.fails("stat", "SS021", "claims", PATH=f"{server}/claims_more")


@pytest.mark.parametrize("case", ["raw", "qcow2", "snapshots", "packed", "vmdk", "cdrom"])
def test_file_beyond_what_was_approved_is_refused(store: Store, case: str) -> None:
    more: dict[str, Any] = {"SIZE": 8}
    path = store.image(format=case if case in ("qcow2", "vmdk") else "raw", size=16 * MiB)
    if case == "snapshots":
        # 8 MiB for the guest, and far more in snapshots that the same file holds.
        path = store.image("with-snapshots", "qcow2", 8 * MiB)
        for number in range(5):
            argv = ["qemu-io", "-f", "qcow2", "-c", f"write -P {number + 1} 0 8M", str(path)]
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
            subprocess.run(["qemu-img", "snapshot", "-c", f"s{number}", str(path)], check=True)
    elif case == "packed":
        path = store.uploads / "packed"
        path.write_bytes(gzip.compress(os.urandom(65536) * 16 * 16))
    elif case == "cdrom":
        more["TYPE"] = 1
    store.fails("cp", "SS072", PATH=path, **more)
    more["SIZE"] = 64
    store.cp(path, **more)


def test_less_than_a_mib_more_is_rounding(store: Store) -> None:
    path = store.uploads / "odd"
    path.write_bytes(b"x" * (3 * MiB + 1000))
    assert store.ok("stat", PATH=path) == "4"
    store.cp(path, SIZE=4)
    store.cp(path, SIZE=3)
    store.fails("cp", "SS072", PATH=path, SIZE=2)


def _used_s() -> float:
    """Return what the drivers have used of the processors until now: how long they took says more about this
    machine's load.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.fault(8, "a few bytes of bz2 do not occupy stat for as long as they like")
def test_bomb_does_not_occupy_stat(store: Store) -> None:
    path = store.uploads / "bomb"
    # Streams in a row are one file.
    path.write_bytes(bz2.compress(bytes(15_000_000)) * 150)
    before = _used_s()
    store.fails("stat", "SS073", "unpack", PATH=path)
    assert _used_s() - before < 20
    store.fails("cp", "SS072", PATH=path, SIZE=1)


@pytest.mark.parametrize("packer", [gzip, bz2, lzma], ids=["gz", "bz2", "xz"])
def test_bomb_is_not_unpacked_beyond_what_was_approved(store: Store, packer: Any) -> None:
    path = store.uploads / "bomb"
    path.write_bytes(packer.compress(bytes(70 * MiB)))
    store.fails("cp", "SS072", "decompressed", PATH=path, SIZE=1)


def test_xz_that_wants_gigabytes_of_memory_is_refused(store: Store) -> None:
    path = store.uploads / "hungry"
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 1}]
    packed = bytearray(lzma.compress(os.urandom(1000), filters=filters))
    # The size of the dictionary, and the checksum of the header that says so.
    import zlib

    assert packed[14] == 0x21, "not where the filter is"
    packed[16] = 40
    packed[20:24] = struct.pack("<I", zlib.crc32(bytes(packed[12:20])))
    path.write_bytes(packed)
    store.fails("cp", "SS021", "Memory usage limit", PATH=path, SIZE=64)


def test_compressed_zeros_stay_holes(store: Store, server: str) -> None:
    raw = store.image(size=32 * MiB)
    for name, packer in (("z.gz", gzip), ("z.bz2", bz2)):
        (store.uploads / name).write_bytes(packer.compress(raw.read_bytes()))
        # A limit on the bytes that any file may hold at once would not tell; what the upload's own directory
        # takes does.
        watched = Watched(store.base)
        source, _ = store.cp(store.uploads / name, SIZE=64)
        assert watched.most() < 4 * MiB
        assert source.read_bytes() == raw.read_bytes()
        assert allocated(source) < MiB
    Server.bodies["sparse"] = raw.read_bytes()
    watched = Watched(store.base)
    source, _ = store.cp(f"{server}/sparse", SIZE=64)
    assert watched.most() < 4 * MiB
    assert allocated(source) < MiB


class Watched:
    """The most that the files below a directory took while it was watched."""

    def __init__(self, top: Path) -> None:
        self._top, self._most, self._ended = top, 0, threading.Event()
        self._before = self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _now(self) -> int:
        total = 0
        for directory, _, names in os.walk(self._top):
            total += sum(allocated(os.path.join(directory, name)) for name in names)
        return total

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self._most = max(self._most, self._now() - self._before)

    def most(self) -> int:
        self._ended.set()
        self._thread.join()
        return self._most


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("packer", [gzip, bz2, lzma], ids=["gz", "bz2", "xz"])
def test_streams_in_a_row_are_one_file(store: Store, packer: Any, streams: int) -> None:
    parts = [os.urandom(200_000) for _ in range(streams)]
    path = store.uploads / "many"
    path.write_bytes((bytes(8) if packer is not bz2 else b"").join(packer.compress(part) for part in parts))
    source, _ = store.cp(path, SIZE=8)
    assert source.read_bytes() == b"".join(parts)
    path.write_bytes(path.read_bytes() + b"garbage that tools ignore")
    assert store.cp(path, SIZE=8)[0].read_bytes() == b"".join(parts)


@pytest.mark.parametrize(
    ("at", "value", "format"),
    [
        (36, 0x7FFFFFFF, ">I"),
        (56, 0x7FFFFFFF, ">I"),
        (40, 1 << 62, ">Q"),
        (48, 1 << 62, ">Q"),
        (60, 0x7FFFFFFF, ">I"),
    ],
)
def test_giant_tables_are_refused_quickly(store: Store, at: int, value: int, format: str) -> None:
    """L1 table, refcount table, snapshots: their sizes and places in the header are whatever somebody wrote
    there.
    """
    path = store.image(format="qcow2", size=8 * MiB)
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(struct.pack(format, value))
    before = _used_s()
    done = store.run("cp", PATH=path, SIZE=8)
    assert _used_s() - before < 20
    if done.returncode == 0:
        assert at in (40, 48), done.stdout
    else:
        assert (
            len(
                [
                    line
                    for line in done.stderr.decode().splitlines()
                    if not line.startswith(("ERROR: ", "WARN: "))
                ]
            )
            == 1
        )


@pytest.mark.parametrize("format", ["vdi", "vpc", "vmdk", "vhdx"])
def test_size_of_a_foreign_format_is_that_of_the_disk_wherever_it_is(
    store: Store, server: str, format: str
) -> None:
    path = store.image(format=format, size=32 * MiB)
    told = int(store.ok("stat", PATH=path))
    Server.bodies["foreign"] = path.read_bytes()
    Server.bodies["foreign.gz"] = gzip.compress(path.read_bytes())
    for url in (f"{server}/foreign", f"{server}/foreign.gz"):
        assert told <= int(store.ok("stat", PATH=url)) <= told + 1
    source, stored = store.cp(f"{server}/foreign.gz", SIZE=told)
    qemu_io(source, stored, "read -P 0x5a 4M 64k")


# -- nor for longer


class Site(Store):
    """The same with settings of its own: the tree by links, and another semishared.conf."""

    def __init__(self, top: Path, settings: str) -> None:
        super().__init__(top)
        self.tree = top / "tree"
        (self.tree / "etc").mkdir(parents=True)
        for name in ("lib", "datastore"):
            shutil.copytree(ROOT / name, self.tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        (self.tree / "etc" / "semishared.conf").write_text(settings)
        self.executables = self.tree / "datastore"


@pytest.fixture()
def hasty(tmp_path: Path) -> Store:
    return Site(tmp_path, "[uploads]\nstat_limit_s = 2\nleast_rate = 32K\nleast_rate_s = 2\n")


def test_server_that_drips_is_given_up(hasty: Store, server: str) -> None:
    for action in ("stat", "cp"):
        hasty.fails(action, "SS073", "drips", PATH=f"{server}/drips", SIZE=1)


def test_rate_that_the_datastore_wants_is_no_drip(tmp_path: Path, server: str) -> None:
    site = Site(tmp_path, "[uploads]\nleast_rate = 1M\nleast_rate_s = 1\n")
    Server.bodies["slow"] = os.urandom(300_000)
    site.template["LIMIT_TRANSFER_BW"] = "100k"
    site.cp(f"{server}/slow", SIZE=1)


@pytest.mark.long
@pytest.mark.fault(8, "a server that drips does not hold stat, nor cp, for ever")
@pytest.mark.parametrize(("action", "limit_s"), [("stat", 90), ("cp", 200)])
def test_server_that_drips_is_given_up_by_default(
    store: Store, server: str, action: str, limit_s: int
) -> None:
    found: list[Any] = []
    store.timeout_s = limit_s

    def work() -> None:
        found.append(store.run(action, PATH=f"{server}/drips", SIZE=1))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert found, f"{action} still waits after {limit_s} s"
    assert found[0].returncode == 1


@pytest.mark.fault(49, "a file without a byte is no disk image, nor one that unpacks to nothing")
def test_an_empty_file_is_refused(store: Store) -> None:
    empty, packed = store.uploads / "empty", store.uploads / "empty.gz"
    empty.touch()
    packed.write_bytes(gzip.compress(b""))
    for path in (empty, packed):
        for action in ("stat", "cp"):
            store.fails(action, "SS021", "empty", PATH=path, SIZE=8)
    store.type = 2  # of files for contexts, where one may be empty
    assert store.cp(empty, SIZE=1, TYPE=5)[0].read_bytes() == b""
