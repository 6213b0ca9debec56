# SPDX-License-Identifier: Apache-2.0
"""Input that is wrong or means harm: one clear line, exit code 1, nothing left, and no shell ever sees it."""

from __future__ import annotations

import base64
import os
import struct
import subprocess
from pathlib import Path
from typing import Callable, Dict, Iterator, List
from xml.sax.saxutils import escape

import pytest

from .cloud import STORE, SYSTEM, Cloud, one_line
from .driver_kills import VM_XML
from .rig import image_bytes

CONTENT = image_bytes("bad input")
CANARY = "/tmp/canary"
HOSTILE = {
    "command substitution": f"$(touch {CANARY})",
    "backticks": f"`touch {CANARY}`",
    "semicolon": f"; touch {CANARY} ;",
    "ampersand": f"& touch {CANARY} &",
    "pipe": f"| touch {CANARY}",
    "newline": f"\ntouch {CANARY}\n",
    "single quote": f"'; touch {CANARY}; '",
    "double quote": f'"; touch {CANARY}; "',
    "spaces": "two words",
    "leading dash": "--help",
    "option": "-oProxyCommand=touch /tmp/canary",
    "unicode": "żółw-猫-\u202e",
    "control": "\x1b[31mred\x07",
    "climbing": "../../../etc/passwd",
    "json": 'json:{"driver":"file","filename":"/etc/shadow"}',
    "protocol": "nbd://127.0.0.1/secret",
}


def xml(text: str) -> str:
    """Escape for XML; what XML cannot hold at all is left out, as oned would."""
    return escape("".join(c for c in text if c in "\n\t" or c >= " "))


@pytest.fixture(scope="module")
def source(cloud: Cloud) -> str:
    path = cloud.upload(CONTENT)
    facts(cloud)
    return path


def facts(cloud: Cloud) -> None:
    cloud.image(1)
    cloud.image(4, persistent=True)
    cloud.vm(7, {0: 1, 1: -1, 2: 4})
    cloud.answers.texts["datastore", 100] = "<DATASTORE><ID>100</ID><TEMPLATE/></DATASTORE>"


@pytest.fixture(autouse=True)
def untouched(cloud: Cloud, source: str) -> Iterator[None]:
    """Whatever the test asks: no shell runs its words, no image appears, the image there is stays as it
    is.
    """
    before = cloud.images()
    yield
    facts(cloud)
    left = cloud.left_of(7)
    cloud.forget(7)
    for node in (cloud.fe, cloud.h1, cloud.h2):
        for directory in ("/tmp", "/var/lib/one", SYSTEM):
            assert not node.path(f"{directory}/canary").exists(), f"a shell on {node.name} has run the input"
    assert cloud.images() == before
    assert cloud.fe.path(source).read_bytes() == CONTENT
    assert not [path for path in left if "disk." in path or "staged" in path]


# -- images
# ------------------------------------------------------------------------------------------------------


def qemu_img(*words: str) -> None:
    subprocess.run(["qemu-img", *words], check=True, capture_output=True)


def backed(path: Path) -> None:
    base = path.with_suffix(".base")
    base.write_bytes(bytes(1 << 20))
    qemu_img("create", "-f", "qcow2", "-b", str(base), "-F", "raw", str(path))


def with_data_file(path: Path) -> None:
    qemu_img("create", "-f", "qcow2", "-o", f"data_file={path}.data", str(path), "1M")


def json_backed(path: Path) -> None:
    backing = 'json:{"driver":"raw","file":{"driver":"file","filename":"/etc/hostname"}}'
    qemu_img("create", "-f", "qcow2", str(path), "1M")
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack(">QI", 512, len(backing)))
        file.seek(512)
        file.write(backing.encode())


def vmdk_extents(path: Path) -> None:
    path.write_text(
        '# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType="monolithicFlat"\n'
        'RW 2048 FLAT "/etc/shadow" 0\n'
    )


def vmdk_split(path: Path) -> None:
    qemu_img("create", "-f", "vmdk", "-o", "subformat=monolithicFlat", str(path), "1M")


def huge(path: Path) -> None:
    qemu_img("create", "-f", "qcow2", str(path), "1M")
    with path.open("r+b") as file:
        file.seek(24)
        file.write(struct.pack(">Q", 1 << 60))


def qed(path: Path) -> None:
    path.write_bytes(b"QED\0" + bytes(65532))


def json_text(path: Path) -> None:
    path.write_text('json:{"driver":"raw","file":{"driver":"file","filename":"/etc/shadow"}}')


def truncated_gzip(path: Path) -> None:
    import gzip

    path.write_bytes(gzip.compress(os.urandom(100_000))[:5000])


def broken_qcow2(path: Path) -> None:
    path.write_bytes(
        b"QFI\xfb\0\0\0\3" + bytes(16) + b"\0\0\0\0\0\1\0\0" + b"\xff" * 40 + bytes(8) + b"\xff" * 4000
    )


def old_qcow(path: Path) -> None:
    path.write_bytes(b"QFI\xfb\0\0\0\1" + bytes(4000))


IMAGES: Dict[str, tuple[Callable[[Path], None], str]] = {
    "qcow2 with a backing file": (backed, "backing file"),
    "qcow2 with a data file": (with_data_file, "data file"),
    "qcow2 backed by json": (json_backed, "backing file"),
    "vmdk descriptor of another file": (vmdk_extents, "extents"),
    "vmdk in several files": (vmdk_split, "extents"),
    "huge virtual size": (huge, "size"),
    "qed": (qed, "qed"),
    "json text": (json_text, "json"),
    "truncated gzip": (truncated_gzip, "gzip"),
    "broken qcow2": (broken_qcow2, "qcow2"),
    "old qcow": (old_qcow, "qcow2 version"),
}


def in_var_tmp(cloud: Cloud, name: str) -> Path:
    return cloud.fe.path(f"/var/tmp/{name}")


@pytest.mark.parametrize("action", ["cp", "stat"])
@pytest.mark.parametrize("kind", IMAGES)
def test_image_that_is_not_what_it_should_be(cloud: Cloud, kind: str, action: str, tmp_path: Path) -> None:
    make, word = IMAGES[kind]
    made = tmp_path / "evil.img"
    make(made)
    path = in_var_tmp(cloud, "evil.img")
    path.write_bytes(made.read_bytes())
    path.chmod(0o644)
    try:
        done = cloud.datastore(action, "<ID>9</ID><TYPE>0</TYPE><PATH>/var/tmp/evil.img</PATH>")
        one_line(done, "/var/tmp/evil.img" if kind != "truncated gzip" else "gzip", word)
    finally:
        path.unlink()


def test_sparse_raw_image_beyond_the_limit(cloud: Cloud) -> None:
    conf = cloud.fe.path("/var/lib/one/remotes/etc/semishared.conf")
    text = conf.read_text()
    conf.write_text(text.replace("max_virtual_size_gib = 65536", "max_virtual_size_gib = 1"))
    path = in_var_tmp(cloud, "huge.raw")
    with path.open("wb") as file:
        file.truncate(2 << 30)
    path.chmod(0o644)
    try:
        for action in ("cp", "stat"):
            one_line(
                cloud.datastore(action, "<ID>9</ID><TYPE>0</TYPE><PATH>/var/tmp/huge.raw</PATH>"), "2.0 GiB"
            )
    finally:
        conf.write_text(text)
        path.unlink()


# -- paths
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["cp", "stat"])
@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/var/tmp/not-there", "/var/tmp/not-there"),
        ("/var/tmp", "directory"),
        ("/var/tmp/unreadable", "Permission denied"),
        ("/etc/passwd", "may not be read"),
        ("/var/tmp/../../etc/passwd", "may not be read"),
        ("/var/tmp/link-to-passwd", "may not be read"),
        ("/var/tmp/linked-directory/passwd", "may not be read"),
        ("/var/tmpfoo/image", "may not be read"),
        ("/var/lib/one/.one/one_auth", "may not be read"),
        ("/dev/zero", ""),
        ("/var/tmp/fifo", ""),
        ("relative/path", ""),
        ("", "not a path"),
        ("http://127.0.0.1:9/$(touch /tmp/canary)", "URL"),
        ("http://127.0.0.1:9/x y", "URL"),
        ("file:///etc/passwd", "URL"),
        ("ssh://-oProxyCommand=touch%20/tmp/canary/x", ""),
        ("http://127.0.0.1:9/nobody-listens", ""),
    ],
)
def test_path_that_may_not_be_read(cloud: Cloud, path: str, word: str, action: str) -> None:
    cloud.fe.run(
        [
            "sh",
            "-c",
            "cd /var/tmp && touch unreadable && chmod 0 unreadable && ln -sfn /etc/passwd link-to-passwd"
            " && ln -sfn /etc linked-directory && { [ -p fifo ] || mkfifo fifo; }",
        ]
    )
    cloud.fe.run(
        ["sh", "-c", "mkdir -p /var/tmpfoo && cp /etc/hostname /var/tmpfoo/image && chmod 755 /var/tmpfoo"],
        user="root",
    )
    done = cloud.datastore(action, f"<ID>9</ID><TYPE>0</TYPE><PATH>{xml(path)}</PATH>")
    one_line(done, word)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("action", ["cp", "stat"])
def test_hostile_path(cloud: Cloud, kind: str, action: str) -> None:
    for path in (HOSTILE[kind], f"/var/tmp/{HOSTILE[kind]}", f"http://127.0.0.1:9/{HOSTILE[kind]}"):
        one_line(cloud.datastore(action, f"<ID>9</ID><TYPE>0</TYPE><PATH>{xml(path)}</PATH>"))


@pytest.mark.parametrize(
    "kind",
    [
        "spaces",
        "semicolon",
        "command substitution",
        "single quote",
        "double quote",
        "unicode",
        "leading dash",
    ],
)
def test_odd_file_name_that_is_there_is_read(cloud: Cloud, kind: str) -> None:
    """A name is only a name: what can be a file is uploaded like any other."""
    name = HOSTILE[kind].replace("/", "_").replace("\u202e", "")
    path = in_var_tmp(cloud, name)
    path.write_bytes(CONTENT)
    path.chmod(0o644)
    try:
        done = cloud.datastore("cp", f"<ID>9</ID><TYPE>0</TYPE><PATH>/var/tmp/{xml(name)}</PATH>")
        assert done.returncode == 0, done.stderr.decode()
        stored = done.stdout.decode().split()[0]
        assert cloud.fe.path(stored).read_bytes() == CONTENT
        assert cloud.datastore("rm", f"<ID>9</ID><SOURCE>{stored}</SOURCE>").returncode == 0
    finally:
        path.unlink()


@pytest.mark.parametrize(
    "source_path",
    [
        "/etc/passwd",
        f"{STORE}/../101/x",
        f"{STORE}/.semishared",
        f"{STORE}/a/b",
        f"{STORE}",
        "relative",
        *HOSTILE.values(),
    ],
)
def test_rm_of_what_is_no_image_of_the_datastore(cloud: Cloud, source_path: str) -> None:
    one_line(cloud.datastore("rm", f"<ID>9</ID><SOURCE>{xml(source_path)}</SOURCE>"))


def test_rm_of_nothing_is_done(cloud: Cloud) -> None:
    for text in ("", f"{STORE}/never-was"):
        assert cloud.datastore("rm", f"<ID>9</ID><SOURCE>{text}</SOURCE>").returncode == 0


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_attributes_of_a_datastore_action(cloud: Cloud, kind: str) -> None:
    evil = xml(HOSTILE[kind])
    for action, image, attributes in (
        ("mkfs", f"<ID>9</ID><SIZE>8</SIZE><FORMAT>{evil}</FORMAT>", ""),
        ("mkfs", f"<ID>9</ID><SIZE>8</SIZE><FORMAT>raw</FORMAT><FS>{evil}</FS>", ""),
        ("mkfs", f"<ID>9</ID><SIZE>{evil}</SIZE><FORMAT>raw</FORMAT>", ""),
        ("mkfs", "<ID>9</ID><SIZE>8</SIZE>", f"<DRIVER>{evil}</DRIVER>"),
        (
            "cp",
            "<ID>9</ID><PATH>http://127.0.0.1:9/x</PATH>",
            f"<LIMIT_TRANSFER_BW>{evil}</LIMIT_TRANSFER_BW>",
        ),
        ("clone", f"<ID>9</ID><PATH>{evil}</PATH><FORMAT>qcow2</FORMAT>", ""),
    ):
        one_line(cloud.datastore(action, image, attributes))


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_image_name_is_only_a_name(cloud: Cloud, kind: str) -> None:
    path = in_var_tmp(cloud, "named.raw")
    path.write_bytes(CONTENT)
    path.chmod(0o644)
    done = cloud.datastore(
        "cp",
        f"<ID>9</ID><NAME>{xml(HOSTILE[kind])}</NAME><TYPE>0</TYPE><PATH>/var/tmp/named.raw</PATH>"
        "<FORMAT></FORMAT>",
        f"<NAME>{xml(HOSTILE[kind])}</NAME>",
    )
    path.unlink()
    assert done.returncode == 0, done.stderr.decode()
    stored = done.stdout.decode().split()[0]
    assert cloud.datastore("rm", f"<ID>9</ID><SOURCE>{stored}</SOURCE>").returncode == 0


def test_wrong_checksum(cloud: Cloud) -> None:
    path = in_var_tmp(cloud, "sum.raw")
    path.write_bytes(CONTENT)
    path.chmod(0o644)
    try:
        for name, value in (("MD5", "0" * 32), ("SHA1", "$(id)"), ("SHA256", "\n")):
            image = f"<ID>9</ID><TYPE>0</TYPE><PATH>/var/tmp/sum.raw</PATH><TEMPLATE><{name}>{value}</{name}></TEMPLATE>"  # noqa: E501
            done = cloud.datastore("cp", image)
            if value.strip():
                one_line(done, name.lower())
            else:
                cloud.datastore("rm", f"<ID>9</ID><SOURCE>{done.stdout.decode().split()[0]}</SOURCE>")
    finally:
        path.unlink()


# -- standard input
# ----------------------------------------------------------------------------------------------

BOMB = (
    '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY a0 "aaaaaaaaaa">'
    + "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))
    + "]><DS_DRIVER_ACTION_DATA><IMAGE><PATH>&a11;</PATH></IMAGE></DS_DRIVER_ACTION_DATA>"
)
EXTERNAL = (
    '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
    "<DS_DRIVER_ACTION_DATA><IMAGE><PATH>&x;</PATH></IMAGE></DS_DRIVER_ACTION_DATA>"
)
GARBAGE: List[bytes] = [
    b"",
    b"\0" * 100,
    b"%%% not base64 %%%",
    base64.b64encode(b"not xml"),
    base64.b64encode(b"<OTHER/>"),
    base64.b64encode(b"<DS_DRIVER_ACTION_DATA>"),
    base64.b64encode(b"<DS_DRIVER_ACTION_DATA/>"),
    base64.b64encode(b"\xff\xfe<DS_DRIVER_ACTION_DATA/>"),
    base64.b64encode(BOMB.encode()),
    base64.b64encode(EXTERNAL.encode()),
    base64.b64encode(
        b"<DS_DRIVER_ACTION_DATA>" + b"<a>" * 200_000 + b"</a>" * 200_000 + b"</DS_DRIVER_ACTION_DATA>"
    ),
]


@pytest.mark.parametrize("action", ["stat", "cp", "mkfs", "clone", "rm", "monitor"])
@pytest.mark.parametrize(
    "garbage",
    GARBAGE,
    ids=[
        "empty",
        "zeros",
        "no base64",
        "no xml",
        "other root",
        "cut",
        "nothing in it",
        "bytes",
        "bomb",
        "external entity",
        "deep",
    ],
)
def test_garbage_on_stdin_of_a_datastore_action(cloud: Cloud, action: str, garbage: bytes) -> None:
    if action == "rm" and garbage in (GARBAGE[6], GARBAGE[10]):
        assert cloud.datastore(action, "", data=garbage).returncode in (0, 1)  # no SOURCE: nothing to remove
        return
    one_line(cloud.datastore(action, "", data=garbage))


VM_BOMB = BOMB.replace("DS_DRIVER_ACTION_DATA", "VM")


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"%%%",
        base64.b64encode(b"<VM>"),
        base64.b64encode(VM_BOMB.encode()),
        base64.b64encode(b"<OTHER/>"),
    ],
    ids=["empty", "no base64", "cut", "bomb", "other root"],
)
@pytest.mark.parametrize("action", ["premigrate", "postmigrate", "failmigrate"])
def test_garbage_on_stdin_of_a_migration(cloud: Cloud, action: str, garbage: bytes) -> None:
    one_line(cloud.tm(action, "h1", "h2", f"{SYSTEM}/7", "7", "101", stdin=garbage))


# -- arguments
# ---------------------------------------------------------------------------------------------------

GOOD: Dict[str, List[str]] = {
    "clone": [f"fe:{STORE}/x", f"h1:{SYSTEM}/7/disk.0", "7", "100"],
    "ln": [f"fe:{STORE}/x", f"h1:{SYSTEM}/7/disk.2", "7", "100"],
    "mkimage": ["8", "raw", f"h1:{SYSTEM}/7/disk.1", "7", "101"],
    "mkswap": ["8", f"h1:{SYSTEM}/7/disk.1", "7", "101"],
    "context": ["/etc/hostname", f"h1:{SYSTEM}/7/disk.3", "7", "101"],
    "mvds": [f"h1:{SYSTEM}/7/disk.2", f"{STORE}/x", "7", "100"],
    "cpds": [f"h1:{SYSTEM}/7/disk.0", f"{STORE}/y", "-1", "7", "100"],
    "delete": [f"h1:{SYSTEM}/7", "7", "101"],
    "mv": [f"h1:{SYSTEM}/7", f"h2:{SYSTEM}/7", "7", "101"],
    "premigrate": ["h1", "h2", f"{SYSTEM}/7", "7", "101"],
    "postmigrate": ["h1", "h2", f"{SYSTEM}/7", "7", "101"],
    "failmigrate": ["h1", "h2", f"{SYSTEM}/7", "7", "101"],
    "monitor_ds": [SYSTEM],
}


def with_evil_parts(action: str) -> List[Callable[[str], List[str]]]:
    """Return ways to spoil an action's arguments: each argument as a whole, and host and path within it."""
    good = GOOD[action]
    ways: List[Callable[[str], List[str]]] = []
    for place, word in enumerate(good):
        before, after = good[:place], good[place + 1 :]
        host, colon, path = word.partition(":")
        ways.append(lambda evil, b=before, a=after: [*b, evil, *a])  # type: ignore[misc] # the defaults bind
        if colon:
            ways.append(lambda evil, b=before, a=after, h=host: [*b, f"{h}:{evil}", *a])  # type: ignore[misc] # the defaults bind
        if colon and host != "fe":  # the front-end's own name before SOURCE is not used, whatever it is
            ways.append(lambda evil, b=before, a=after, p=path: [*b, f"{evil}:{p}", *a])  # type: ignore[misc] # the defaults bind
    return ways


FULL = bool(os.environ.get("SEMISHARED_FULL"))


@pytest.mark.parametrize("action", [name for name in GOOD if name != "monitor_ds"])
def test_hostile_arguments(cloud: Cloud, action: str) -> None:
    """Every argument, host and path in turn is replaced: by everything hostile, or (not in full) by two of
    them.
    """
    kinds = list(HOSTILE.values())
    stdin = base64.b64encode(VM_XML.encode()) if "migrate" in action else b""
    failures = []
    for number, way in enumerate(with_evil_parts(action)):
        for evil in kinds if FULL else [kinds[(2 * number + n) % len(kinds)] for n in range(2)]:
            words = way(evil)
            try:
                one_line(cloud.tm(action, *words, stdin=stdin))
            except AssertionError as e:
                failures.append(f"{words}: {e}")
    assert not failures, "\n".join(failures)


OUTSIDE = [
    "/",
    "/7",
    "/etc/7/disk.0",
    f"{SYSTEM}/8/disk.0",
    f"{SYSTEM}/../7/disk.0",
    *(f"{SYSTEM}/7/{name}" for name in ("disk.0/disk.0", ".semishared", "disk.x", "disk.99999999999")),
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_delete_stays_in_the_vm_directory(cloud: Cloud, path: str) -> None:
    one_line(cloud.tm("delete", f"h1:{path}", "7", "101"))


UUID = "11111111-2222-4333-8444-555555555555"

# -- what oned says
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SEMISHARED_PLACE", "SEMISHARED_LOCAL"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_attribute_values(cloud: Cloud, source: str, name: str, kind: str) -> None:
    cloud.image(1, attributes=f"<{name}>{xml(HOSTILE[kind])}</{name}>")
    one_line(cloud.clone(source), name)


@pytest.mark.parametrize(
    ("attributes", "persistent", "word"),
    [
        (
            "<SEMISHARED_PLACE>shared</SEMISHARED_PLACE><SEMISHARED_LOCAL>copy</SEMISHARED_LOCAL>",
            False,
            "contradicts",
        ),
        (
            "<SEMISHARED_PLACE>shared</SEMISHARED_PLACE><SEMISHARED_LOCAL>remote-first</SEMISHARED_LOCAL>",
            False,
            "contradicts",
        ),
        (f"<SEMISHARED_PLACE>local</SEMISHARED_PLACE><LUKS_SECRET>{UUID}</LUKS_SECRET>", True, "encrypted"),
    ],
)
def test_values_that_do_not_go_together(
    cloud: Cloud, source: str, attributes: str, persistent: bool, word: str
) -> None:
    cloud.image(1, persistent=persistent, attributes=attributes)
    cloud.image(1, persistent=persistent, attributes=attributes)
    one_line(cloud.tm("ln" if persistent else "clone", *cloud.clone_words(source)), word)


ANSWERS = {
    "bomb": VM_BOMB,
    "external entity": EXTERNAL.replace("DS_DRIVER_ACTION_DATA", "VM"),
    "no xml": "not xml at all",
    "cut": "<VM><ID>7</ID>",
    "other root": "<IMAGE/>",
    "no such disk": "<VM><ID>7</ID><TEMPLATE/></VM>",
    "empty": "",
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_oned_answers_nonsense(cloud: Cloud, source: str, kind: str) -> None:
    cloud.answers.texts["vm", 7] = ANSWERS[kind]
    one_line(cloud.clone(source))


@pytest.mark.parametrize("kind", HOSTILE)
def test_oned_serves_hostile_values(cloud: Cloud, source: str, kind: str) -> None:
    evil = xml(HOSTILE[kind])
    cloud.image(1, format=evil)
    one_line(cloud.clone(source), "format")
    cloud.vm(7, {1: -1}, fs=evil)
    one_line(cloud.tm("mkimage", *GOOD["mkimage"]), "disk 1: FS")
    cloud.answers.texts["vm", 7] = (
        f"<VM><ID>7</ID><LCM_STATE>26</LCM_STATE><DEPLOY_ID>{evil}</DEPLOY_ID><TEMPLATE><DISK><DISK_ID>0</DISK_ID>"
        "<FORMAT>qcow2</FORMAT></DISK></TEMPLATE></VM>"
    )
    one_line(cloud.tm("cpds", *GOOD["cpds"]))


def test_oned_does_not_know_it(cloud: Cloud, source: str) -> None:
    one_line(cloud.clone(source, vm=12345), "one.vm.info 12345")


# -- context
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_context_files(cloud: Cloud, kind: str) -> None:
    evil = HOSTILE[kind]
    rest = GOOD["context"][1:]
    for word in (evil, f"/nowhere/{evil}"):
        one_line(cloud.tm("context", "/etc/hostname", word, *rest))
    for name in (evil,):
        done = cloud.tm("context", f"/etc/hostname:{name}", *rest)
        if "/" in name or any(c < " " for c in name):
            one_line(done)
        else:
            # A name is only a name: it ends in the ISO as it is.
            assert done.returncode == 0, done.stderr.decode()
            listed = cloud.h1.run(["isoinfo", "-R", "-f", "-i", f"{SYSTEM}/7/disk.3"]).stdout.decode()
            assert f"/{name.strip(chr(39))}" in listed.splitlines()
            cloud.forget(7)


def test_context_name_does_not_climb(cloud: Cloud) -> None:
    for name in ("..", ".", "", "../x", "a/b"):
        one_line(cloud.tm("context", f"/etc/hostname:{name}", *GOOD["context"][1:]))


# -- hands off
# ---------------------------------------------------------------------------------------------------


def test_persistent_disk_that_is_a_file_is_not_deleted(cloud: Cloud, source: str) -> None:
    """mvds of something that is no link might be the only copy of someone's data."""
    cloud.h1.run(["mkdir", "-p", f"{SYSTEM}/7"])
    cloud.h1.run(["cp", "/etc/hostname", f"{SYSTEM}/7/disk.2"])
    try:
        one_line(cloud.tm("mvds", f"h1:{SYSTEM}/7/disk.2", source, "7", "100"), "disk.2")
        assert cloud.h1.path(f"{SYSTEM}/7/disk.2").exists()
    finally:
        cloud.forget(7)
