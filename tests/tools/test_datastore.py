# SPDX-License-Identifier: Apache-2.0
"""The datastore actions: the executables of this checkout, called as one_datastore calls them, on local files
and http.
"""

from __future__ import annotations

import base64
import bz2
import functools
import gzip
import hashlib
import http.server
import json
import lzma
import os
import subprocess
import threading
from pathlib import Path
from typing import Any, Iterator
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest

from semishared.store.dir import image as dir_image
from semishared.tools import extents
from tools.world import MiB, allocated, lay_over, make_image, qemu_io

ROOT = Path(__file__).resolve().parents[2]


class Store:
    """Datastore 100, and files to upload beside it."""

    executables = ROOT / "datastore"
    path = "/usr/bin:/bin"
    timeout_s = 60

    def __init__(self, top: Path) -> None:
        self.base, self.uploads = top / "100", top / "uploads"
        self.base.mkdir()
        self.uploads.mkdir()
        self.template: dict[str, str] = {"SAFE_DIRS": str(self.uploads), "RESTRICTED_DIRS": "/"}
        self.type = 0

    def message(self, attributes: dict[str, str] | None = None, **image: Any) -> str:
        """Return what oned says of an image and of the datastore."""
        fields = "".join(
            f"<{name}>{escape(str(value))}</{name}>" for name, value in {"ID": 7, "TYPE": 0, **image}.items()
        )
        more = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in (attributes or {}).items())
        template = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in self.template.items())
        return (
            f"<DS_DRIVER_ACTION_DATA><IMAGE>{fields}<TEMPLATE>{more}</TEMPLATE></IMAGE><DATASTORE><ID>100</ID><TYPE>{self.type}</TYPE>"
            f"<BASE_PATH>{escape(str(self.base))}</BASE_PATH><TEMPLATE>{template}</TEMPLATE></DATASTORE></DS_DRIVER_ACTION_DATA>"
        )

    def run(
        self, action: str, *, attributes: dict[str, str] | None = None, **image: Any
    ) -> subprocess.CompletedProcess[bytes]:
        data = self.message(attributes, **image)
        return subprocess.run(
            [str(self.executables / action), "7"],
            input=base64.b64encode(data.encode()),
            capture_output=True,
            check=False,
            timeout=self.timeout_s,
            cwd="/",
            env={"HOME": "/var/lib/no-home", "PATH": self.path},
        )

    def ok(self, action: str, **image: Any) -> str:
        done = self.run(action, **image)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().rstrip("\n")

    def cp(self, path: object, **image: Any) -> tuple[Path, str]:
        """Upload; return SOURCE and FORMAT."""
        source, format = self.ok("cp", PATH=path, **image).split(" ")
        assert Path(source).parent == self.base
        return Path(source), format

    def fails(self, action: str, error_id: str, *words: str, **image: Any) -> None:
        """Expect one clear line, exit code 1, and nothing left in the datastore."""
        before = self.files()
        done = self.run(action, **image)
        assert done.returncode == 1, done.stderr.decode()
        assert done.stdout == b""
        plain = [
            line
            for line in done.stderr.decode().splitlines()
            if not line.startswith(("INFO: ", "WARN: ", "ERROR: "))
        ]
        assert len(plain) == 1, plain
        assert done.stderr.decode().splitlines()[0] == plain[0], "log lines come behind it"
        assert plain[0].startswith(f"{error_id} ") and f"[{action}" in plain[0], plain[0]
        for word in words:
            assert word in plain[0]
        assert self.files() == before

    def files(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.base))
            for path in self.base.rglob("*")
            if path.name not in (".semishared", ".uploads", ".uploads.lock")
        )

    def image(self, name: str = "image", format: str = "raw", size: int = 32 * MiB) -> Path:
        path = self.uploads / name
        make_image(path, format, size, "write -P 0x5a 4M 64k")
        return path


@pytest.fixture()
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def generation(source: Path) -> str:
    stored = dir_image.Stored(str(source))
    return dir_image.generation(stored, dir_image.see(stored))


@pytest.mark.parametrize("format", ["raw", "qcow2"])
def test_upload_keeps_content_format_and_holes_and_knows_its_generation(store: Store, format: str) -> None:
    path = store.image("my image's", format)
    assert store.ok("stat", PATH=path) == "32"
    source, stored = store.cp(path)
    assert stored == format
    assert source.read_bytes() == path.read_bytes()
    assert allocated(source) < MiB
    assert source.stat().st_mode & 0o777 == 0o660
    manifest = extents.copy(str(source), None, format, "test")
    assert generation(source) == manifest.generation
    assert (store.base / ".semishared" / source.name / "manifest").read_bytes() == manifest.text()
    assert os.listdir(store.base / ".semishared" / ".uploads") == []


def test_the_same_content_twice_is_two_images_of_one_generation(store: Store) -> None:
    path = store.image()
    (first, _), (second, _) = store.cp(path), store.cp(path)
    assert first != second
    assert generation(first) == generation(second) != ""


@pytest.mark.parametrize("packer", [gzip, bz2, lzma], ids=["gz", "bz2", "xz"])
@pytest.mark.parametrize("format", ["raw", "qcow2"])
def test_compressed_upload_is_unpacked(store: Store, packer: Any, format: str) -> None:
    path = store.image(format=format, size=16 * MiB)
    packed = store.uploads / "packed"
    packed.write_bytes(packer.compress(path.read_bytes()))
    assert store.ok("stat", PATH=packed) == "16"
    source, stored = store.cp(packed)
    assert stored == format
    assert source.read_bytes() == path.read_bytes()
    store.template["NO_DECOMPRESS"] = "yes"
    source, stored = store.cp(packed)
    assert (source.read_bytes(), stored) == (packed.read_bytes(), "raw")


@pytest.mark.parametrize(
    ("action", "packer", "how"),
    [
        ("cp", gzip, "cut"),
        ("cp", bz2, "cut"),
        ("cp", lzma, "cut"),
        ("cp", gzip, "spoiled"),
        ("cp", bz2, "spoiled"),
        ("cp", lzma, "spoiled"),
        ("cp", gzip, "head only"),
        ("stat", gzip, "spoiled"),
        ("stat", lzma, "cut"),
        ("stat", bz2, "head only"),
    ],
)
def test_broken_compressed_data_is_refused(store: Store, packer: Any, how: str, action: str) -> None:
    data = packer.compress(os.urandom(200000))
    broken = {
        "cut": data[: len(data) // 2],
        "spoiled": data[:90000] + b"\xff" * 60000 + data[150000:],
        "head only": data[:7],
    }[how]
    path = store.uploads / "packed"
    path.write_bytes(broken)
    store.fails(action, "SS021", "cannot be decompressed", PATH=path)


@pytest.mark.parametrize("action", ["cp", "stat"])
def test_packed_image_with_a_cut_header_is_no_crash(store: Store, action: str) -> None:
    path = store.uploads / "packed"
    path.write_bytes(gzip.compress(b"QFI\xfb"))
    done = store.run(action, PATH=path)
    assert done.returncode in (0, 1), done.stderr.decode()


@pytest.mark.parametrize("kind", ["md5", "sha1", "sha256"])
def test_checksum_is_checked(store: Store, kind: str) -> None:
    path = store.image()
    good = hashlib.new(kind, path.read_bytes()).hexdigest()
    store.cp(path, attributes={kind.upper(): good.upper()})
    store.fails(
        "cp",
        "SS023",
        kind,
        PATH=path,
        attributes={kind.upper(): good[:-1] + ("0" if good[-1] != "0" else "1")},
    )


@pytest.mark.parametrize(
    ("uploaded", "driver"),
    [("raw", "qcow2"), ("qcow2", "raw"), ("vmdk", "raw"), ("vdi", ""), ("vpc", "qcow2")],
)
def test_image_is_converted_to_the_driver_of_the_datastore(store: Store, uploaded: str, driver: str) -> None:
    path = store.image(format=uploaded)
    if driver:
        store.template["DRIVER"] = driver
    source, stored = store.cp(path)
    assert stored == (driver or "qcow2")
    qemu_io(source, stored, "read -P 0x5a 4M 64k", "read -P 0 5M 1M")
    assert generation(source)


def test_not_converted_when_the_datastore_says_so(store: Store) -> None:
    store.template.update(DRIVER="qcow2", CONVERT="no")
    assert store.cp(store.image())[1] == "raw"


def test_unknown_driver_of_the_datastore_is_refused(store: Store) -> None:
    store.template["DRIVER"] = "vhd"
    store.fails("cp", "SS002", "'vhd'", PATH=store.image())


def test_not_sparse_means_allocated(store: Store) -> None:
    store.template["SPARSE"] = "NO"
    source, _ = store.cp(store.image(size=8 * MiB))
    assert allocated(source) >= 8 * MiB


def test_cdrom_and_files_are_stored_as_they_are(store: Store) -> None:
    path = store.image(format="qcow2")
    store.template["DRIVER"] = "raw"
    source, stored = store.cp(path, TYPE=1)
    assert (source.read_bytes(), stored) == (path.read_bytes(), "raw")
    store.type = 2
    packed = store.uploads / "initrd.gz"
    packed.write_bytes(gzip.compress(b"initrd"))
    source, _ = store.cp(packed, TYPE=4)
    assert source.read_bytes() == packed.read_bytes()


@pytest.mark.parametrize("action", ["cp", "stat"])
def test_path_outside_of_the_safe_directories_is_refused(store: Store, tmp_path: Path, action: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 1000)
    beside = Path(f"{store.uploads}X")
    beside.mkdir()
    (beside / "image").write_bytes(b"x" * 1000)
    (store.uploads / "link").symlink_to(secret)
    (store.uploads / "directory").symlink_to(tmp_path)
    for path in (
        secret,
        beside / "image",
        store.uploads / "link",
        store.uploads / "directory" / "secret",
        f"{store.uploads}/../secret",
        "/etc/passwd",
        f"{store.uploads}/directory/uploads/../secret",
    ):
        store.fails(action, "SS022", "may not be read by this datastore", PATH=path)


def test_safe_directory_may_itself_be_a_link(store: Store, tmp_path: Path) -> None:
    path = store.image()
    (tmp_path / "alias").symlink_to(store.uploads)
    store.template["SAFE_DIRS"] = str(tmp_path / "alias")
    store.cp(path)
    store.cp(tmp_path / "alias" / "image")


@pytest.mark.parametrize("action", ["cp", "stat"])
def test_what_is_no_readable_file_is_a_missing_image(store: Store, action: str) -> None:
    os.mkfifo(store.uploads / "fifo")
    (store.uploads / "dangling").symlink_to("/no/such/file")
    for name in ("none", "fifo", "dangling", ""):
        store.fails(action, "SS020", PATH=f"{store.uploads}/{name}")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/x\ny",
        "/x\ty",
        "http://h/$(reboot)",
        "http://h/a b",
        "ftp://h/x",
        "-x",
        "file:///etc/passwd",
        "http://-o/;x",
    ],
)
def test_hostile_path_is_refused(store: Store, path: str) -> None:
    done = store.run("cp", PATH=path)
    assert done.returncode == 1, done.stderr.decode()
    assert len([line for line in done.stderr.decode().splitlines() if not line.startswith("WARN: ")]) == 1
    assert store.files() == []


@pytest.mark.parametrize("action", ["stat", "cp"])
@pytest.mark.parametrize("url", ["s3://b/o", "lxd://x"])
def test_scheme_that_only_the_downloader_knows_is_refused(store: Store, action: str, url: str) -> None:
    store.fails(action, "SS003", "uploads from", PATH=url)
    assert store.files() == []


@pytest.mark.parametrize("action", ["stat", "cp"])
@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("ssh://h:/etc/shadow", "SS022"),
        ("ssh://h&reboot:/x", "SS001"),
        ("ssh://-oProxyCommand=x:/y", "SS001"),
        ("ssh://h:/a/../b", "SS001"),
        ("ssh://h:relative", "SS001"),
    ],
)
def test_ssh_url_is_refused_unless_safe_dirs_names_its_machine(
    store: Store, action: str, url: str, error: str
) -> None:
    store.fails(action, error, PATH=url)


def test_backup_without_the_downloader_is_refused(store: Store) -> None:
    url = "rsync://107//0:8e4cbd/var/lib/one/datastores/107/3/8e4cbd/disk.1.0"
    store.fails("cp", "SS003", "uploads from rsync://", PATH=url, attributes={"FROM_BACKUP_DS": "107"})


def test_hostile_rate_limit_is_refused(store: Store) -> None:
    store.template["LIMIT_TRANSFER_BW"] = "10; reboot"
    store.fails("cp", "SS002", "LIMIT_TRANSFER_BW", PATH=store.image())


@pytest.mark.parametrize("driver", ["", "raw", "qcow2"])
def test_qcow2_with_a_backing_file_is_refused_even_packed(store: Store, driver: str) -> None:
    (store.uploads / "secret").write_bytes(b"s" * MiB)
    path = store.uploads / "evil"
    argv = [
        "qemu-img",
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        str(store.uploads / "secret"),
        str(path),
    ]
    subprocess.run(argv, check=True)
    if driver:
        store.template["DRIVER"] = driver
    store.fails("cp", "SS021", "a backing file", "evil", PATH=path)
    (store.uploads / "packed").write_bytes(gzip.compress(path.read_bytes()))
    store.fails("cp", "SS021", "a backing file", PATH=store.uploads / "packed")


def test_huge_virtual_size_is_refused(store: Store) -> None:
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(store.uploads / "huge"), "1P"], check=True)
    store.fails("cp", "SS021", "1024.0 TiB", PATH=store.uploads / "huge")


@pytest.mark.parametrize(
    ("format", "fs"), [("raw", ""), ("qcow2", ""), ("raw", "ext4"), ("qcow2", "ext4"), ("", "")]
)
def test_mkfs_makes_an_empty_image(store: Store, tmp_path: Path, format: str, fs: str) -> None:
    source = Path(store.ok("mkfs", SIZE=16, FORMAT=format, FS=fs))
    assert source.parent == store.base
    actual = format or "raw"
    qemu_io(source, actual, "read -P 0 8M 64k" if not fs else "read 8M 64k")
    subprocess.run(
        ["qemu-img", "convert", "-f", actual, "-O", "raw", str(source), str(tmp_path / "raw")], check=True
    )
    assert os.path.getsize(tmp_path / "raw") == 16 * MiB
    if fs:
        subprocess.run(["fsck.ext4", "-fn", str(tmp_path / "raw")], check=True, capture_output=True)
    assert generation(source) == "", "its first base copy computes the manifest"


def test_mkfs_for_save_as_names_a_place_and_makes_nothing(store: Store) -> None:
    source = store.ok("mkfs", SIZE=16, FORMAT="save_as")
    assert os.path.dirname(source) == str(store.base)
    assert store.files() == []
    assert store.ok("mkfs", SIZE=16, FORMAT="save_as") != source


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ({"FORMAT": "vmdk"}, "'vmdk'"),
        ({"FS": "ext4;x"}, "'ext4;x'"),
        ({"SIZE": 0}, "SIZE"),
        ({"SIZE": "-4"}, "SIZE"),
        ({"SIZE": 1 << 40}, "SIZE"),
    ],
)
def test_mkfs_refuses_what_it_cannot_make(store: Store, image: dict[str, Any], words: str) -> None:
    store.fails("mkfs", "SS002", words, **{"SIZE": 16, "FORMAT": "raw", **image})


@pytest.mark.parametrize("format", ["raw", "qcow2"])
def test_clone_is_an_image_of_its_own(store: Store, format: str) -> None:
    source, _ = store.cp(store.image(format=format))
    copy, said = store.ok("clone", PATH=source, FORMAT=format).split(" ")
    assert said == format
    qemu_io(source, format, "write -P 0x11 4M 64k")
    qemu_io(copy, format, "read -P 0x5a 4M 64k")
    assert generation(Path(copy))


def test_clone_of_what_is_not_there(store: Store) -> None:
    store.fails("clone", "SS024", PATH=store.base / "none", FORMAT="raw")


@pytest.mark.fault(51, "an image that was cut off or marked as corrupt in its store is not cloned")
def test_clone_is_judged_as_an_upload_is(store: Store) -> None:
    for harm, word in (("cut", "cut off"), ("mark", "corrupt")):
        source, _ = store.cp(store.image(harm, format="qcow2"))
        whole = source.read_bytes()
        source.chmod(0o660)
        source.write_bytes(whole[: 5 << 16] if harm == "cut" else whole[:79] + b"\2" + whole[80:])
        store.fails("clone", "SS077", word, PATH=source, FORMAT="qcow2")


def test_raw_image_whose_guest_made_it_look_like_qcow2_is_cloned_as_raw(store: Store) -> None:
    source, _ = store.cp(store.image())
    evil = store.uploads / "evil"
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", "-u", "-F", "raw", "-b", "/etc/passwd", str(evil), "1M"],
        check=True,
    )
    source.write_bytes(evil.read_bytes())
    copy, format = store.ok("clone", PATH=source, FORMAT="raw").split(" ")
    assert (Path(copy).read_bytes(), format) == (evil.read_bytes(), "raw")


def test_rm_twice_and_all_that_belongs_to_the_image(store: Store) -> None:
    source, _ = store.cp(store.image())
    other, _ = store.cp(store.image("other"))
    Path(f"{source}.snap").mkdir()
    for _ in range(2):
        assert store.ok("rm", SOURCE=source) == ""
        assert not source.exists()
    assert not Path(f"{source}.snap").exists()
    assert not (store.base / ".semishared" / source.name).exists()
    assert other.exists()
    assert generation(other)
    assert store.ok("rm", SOURCE="") == ""


def test_rm_of_what_is_no_image_of_the_datastore_is_refused(store: Store, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"x")
    (store.base / ".hidden").write_bytes(b"x")
    for source in (
        victim,
        store.base,
        f"{store.base}/.semishared",
        f"{store.base}/.hidden",
        f"{store.base}/sub/x",
        "/",
    ):
        store.fails("rm", "SS022", "no image of datastore 100", SOURCE=source)
    for source in (f"{store.base}/../victim", "victim", "-rf"):
        store.fails("rm", "SS001", "SOURCE", SOURCE=source)
    assert victim.exists()


def test_rm_of_an_image_that_is_a_link_removes_the_link(store: Store, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"x")
    (store.base / "link").symlink_to(victim)
    store.ok("rm", SOURCE=store.base / "link")
    assert victim.exists()


def test_monitor_tells_the_capacity(store: Store) -> None:
    # A file system that nobody else writes to.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(store.base)], check=True)
    try:
        (store.base / "image").write_bytes(b"x" * 5 * MiB)
        lines = dict(line.split("=") for line in store.ok("monitor").splitlines())
    finally:
        subprocess.run(["umount", str(store.base)], check=True)
    assert lines == {"USED_MB": "5", "TOTAL_MB": "64", "FREE_MB": "59"}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/to-a-file":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
        else:
            super().do_GET()


@pytest.fixture()
def url(store: Store) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(store.uploads))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_http_upload(store: Store, url: str) -> None:
    path = store.image(format="qcow2")
    source, format = store.cp(
        f"{url}/image?x=1&y=2", attributes={"SHA256": hashlib.sha256(path.read_bytes()).hexdigest()}
    )
    assert (source.read_bytes(), format) == (path.read_bytes(), "qcow2")
    store.fails("cp", "SS023", PATH=f"{url}/image", attributes={"MD5": "0" * 32})


def test_size_of_a_download_is_that_of_the_disk(store: Store, url: str) -> None:
    path = store.image(format="qcow2")
    size = str(
        json.loads(subprocess.check_output(["qemu-img", "info", "--output=json", str(path)]))["virtual-size"]
        // MiB
    )
    assert store.ok("stat", PATH=f"{url}/image") == size
    for name, pack in (("packed", gzip.compress), ("xz", lzma.compress)):
        (store.uploads / name).write_bytes(pack(path.read_bytes()))
        assert store.ok("stat", PATH=f"{url}/{name}") == size
    (store.uploads / "raw").write_bytes(b"x" * (3 * MiB + 1))
    assert store.ok("stat", PATH=f"{url}/raw") == "4"
    (store.uploads / "raw.gz").write_bytes(gzip.compress(b"x" * (5 * MiB + 1)))
    assert store.ok("stat", PATH=f"{url}/raw.gz") == "6"
    packers: list[tuple[str, Any]] = [("raw.xz", lzma.compress), ("raw.bz2", bz2.compress)]
    for name, pack in packers:
        (store.uploads / name).write_bytes(pack(b"x" * (7 * MiB)))
        assert store.ok("stat", PATH=f"{url}/{name}") == "7"
    (store.uploads / "cut.gz").write_bytes(gzip.compress(os.urandom(MiB))[:-9])
    store.fails("stat", "SS026", PATH=f"{url}/cut.gz")
    store.template["NO_DECOMPRESS"] = "yes"
    assert store.ok("stat", PATH=f"{url}/raw.gz") == "1"
    (store.uploads / "zeros.gz").write_bytes(gzip.compress(bytes(9 * MiB)))
    assert store.ok("stat", PATH=store.uploads / "zeros.gz") == "1"
    for path_ in (f"{url}/none", f"{url}/to-a-file", "http://127.0.0.1:9/x"):
        store.fails("stat", "SS026", PATH=path_)


def test_http_errors_and_redirects_to_files_are_refused(store: Store, url: str) -> None:
    for path in (f"{url}/none", f"{url}/to-a-file", "http://127.0.0.1:9/x"):
        store.fails("cp", "SS026", "could not be downloaded", PATH=path)


def test_downloaded_image_is_inspected_too(store: Store, url: str) -> None:
    lay_over(store.uploads / "evil", "/etc/passwd")
    store.fails("cp", "SS021", "a backing file", PATH=f"{url}/evil")


def test_killed_uploads_are_swept_by_the_next_and_running_ones_are_not(store: Store) -> None:
    import fcntl

    uploads = store.base / ".semishared" / ".uploads"
    for name in (("d" * 32), ("a" * 32)):
        (uploads / name).mkdir(parents=True)
        (uploads / name / "image").write_bytes(b"x")
        (uploads / name / "lock").touch()
    (store.base / ".semishared" / ("d" * 32)).mkdir()
    with open(uploads / ("a" * 32) / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store.cp(store.image())
    assert os.listdir(uploads) == [("a" * 32)]
    assert not (store.base / ".semishared" / ("d" * 32)).exists()


@pytest.mark.parametrize("action", ["snap_revert", "snap_flatten"])
@pytest.mark.parametrize("format", ["raw", "qcow2"])
def test_image_when_reverted_keeps_the_size_that_oned_knows(store: Store, action: str, format: str) -> None:
    source, _ = store.cp(store.image(format=format, size=8 * MiB))
    (store.base / f"{source.name}.snap").mkdir()
    (store.base / f"{source.name}.snap" / "0").write_bytes(source.read_bytes())
    subprocess.run(["qemu-img", "resize", "-q", "-f", format, str(source), "12M"], check=True)
    qemu_io(source, format, "write -P 0x11 4M 64k")
    store.ok(action, SOURCE=source, FORMAT=format, SIZE=12, TARGET_SNAPSHOT=0)
    qemu_io(source, format, "read -P 0x5a 4M 64k", "read -P 0 8M 4M")
    info = json.loads(
        subprocess.check_output(["qemu-img", "info", "--output=json", "-f", format, str(source)])
    )
    assert info["virtual-size"] == 12 * MiB


def test_generation_survives_in_json_with_session_size_and_time(store: Store) -> None:
    source, _ = store.cp(store.image())
    side = store.base / ".semishared" / source.name
    header = json.loads((side / "generation.json").read_text())
    stat = source.stat()
    assert (header["size"], header["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns)
    assert header["session"] == (side / "session").read_text().strip() != ""
    assert header["format"] == "raw"


def test_export_tells_a_marketplace_where_the_image_is_and_what(store: Store) -> None:
    source, _ = store.cp(store.image(format="qcow2"))
    answer = ElementTree.fromstring(store.ok("export", SOURCE=source, SIZE=7, FORMAT="qcow2"))
    assert {element.tag: element.text for element in answer} == {
        "IMPORT_SOURCE": str(source),
        "MD5": hashlib.md5(source.read_bytes()).hexdigest(),
        "SIZE": "7",
        "FORMAT": "qcow2",
        "DISPOSE": "NO",
    }
    store.fails("export", "SS022", SOURCE="/etc/passwd")
    store.fails("export", "SS020", SOURCE=source.with_name("gone"))
