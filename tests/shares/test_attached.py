# SPDX-License-Identifier: Apache-2.0
"""Which directories are given to guests, and as whom: the real daemon of this machine, started as libvirt
starts it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Callable

import pytest

from semishared.errors import (
    BadRecord,
    MissingImage,
    OtherStore,
    RestrictedPath,
    SemisharedError,
    ShareRefused,
)
from semishared.model.share import steps as share_steps
from semishared.model.share.share import Share, Tree, first_uid
from semishared.model.steps import NoteClients
from semishared.model.vm.hypervisor_steps import CheckShare, ReadClients
from semishared.share import attached
from semishared.share.inspection import DAEMONS, QEMUS
from semishared.share.registered import opened
from semishared.table import carry_out
from semishared.vmm import on_host, virtiofsd
from shares.cloud import MiB, on
from shares.conftest import run

VMM = Path(__file__).resolve().parents[2] / "vmm"
MARKER = "0123456789abcdef" * 2


@pytest.fixture()
def root() -> Iterator[Path]:
    """Return a root of shares with share-7 of owner 3 and share-8 of owner 4; all may pass on the way to
    it.
    """
    top = Path(tempfile.mkdtemp(dir="/srv"))
    top.chmod(0o711)
    root = top / "root"
    root.mkdir()
    run("mount", "-t", "tmpfs", "-o", "nosuid,nodev,mode=711", "shares", root)
    try:
        tree = Tree("plain", str(root), MARKER)
        on(
            share_steps.MarkRoot(tree, MARKER),
            *(share_steps.MakeShare(tree, Share(image, image - 4, 1, 8 * MiB)) for image in (7, 8)),
        )
        yield root
    finally:
        run("umount", root)
        root.rmdir()
        if (top / "way").exists():
            run("umount", top / "way")
            (top / "way").rmdir()
        top.rmdir()


def remounted(root: Path, options: str) -> None:
    run("mount", "-o", f"remount,{options}", root)


def is_link(root: Path) -> None:
    (root / "share-7").rename(root / "away")
    (root / "share-7").symlink_to("/etc")


def is_guests(root: Path) -> None:
    os.chown(root / ".semishared/.shares", 100000, 100000)


def registered(
    root: Path, options: str = "nosuid,nodev", then: Callable[[Path], object] = lambda top: None
) -> None:
    """Register way/theirs beside the root as share-5 of owner 3, on a mount of its own."""
    top = root.parent / "way"
    top.mkdir()
    run("mount", "-t", "tmpfs", "-o", f"{options},mode=711", "theirs", top)
    (top / "theirs").mkdir()
    on(
        share_steps.MakeShare(
            Tree("plain", str(root), MARKER), Share(5, 3, 1, 0, directory=str(top / "theirs"))
        )
    )
    then(top)


def is_link_by_now(top: Path) -> None:
    (top / "theirs").rename(top / "away")
    (top / "theirs").symlink_to("/etc")


CASES: dict[str, tuple[Callable[[Path], object], str, type[SemisharedError], str]] = {
    "not a share": (
        lambda root: (root / "other").mkdir(),
        "other",
        ShareRefused,
        "no share that semishared has made",
    ),
    "of the system": (lambda root: None, "/etc", ShareRefused, "no share that semishared has made"),
    "called like one": (
        lambda root: (root / "share-9").mkdir(),
        "share-9",
        ShareRefused,
        "no share that semishared has made",
    ),
    "in another share": (
        lambda root: (root / "share-7/share-7").mkdir(),
        "share-7/share-7",
        BadRecord,
        "can be written to by others",
    ),
    "a way around": (lambda root: None, "share-8/../share-7", ShareRefused, "no share"),
    "a comma": (lambda root: None, "share-7,source=", ShareRefused, "no share"),
    "another image's": (lambda root: None, "share-8", ShareRefused, "made for image 7"),
    "a link": (is_link, "share-7", ShareRefused, "no share"),
    "records that a guest can write": (is_guests, "share-7", BadRecord, "can be written to by others"),
    "a way to them that all can write": (
        lambda root: (root / ".semishared").chmod(0o777),
        "share-7",
        BadRecord,
        "can be written to by others",
    ),
    "a root that all can write": (
        lambda root: root.chmod(0o777),
        "share-7",
        BadRecord,
        "can be written to by others",
    ),
    "a way that others may not go": (
        lambda root: root.parent.chmod(0o750),
        "share-7",
        ShareRefused,
        "lets no others pass",
    ),
    "not ready": (
        lambda root: on(share_steps.RemoveShare(Tree("plain", str(root), MARKER), 7, "")),
        "share-7",
        ShareRefused,
        "no root of shares",
    ),
    "gone": (lambda root: (root / "share-7").rename(root / "gone"), "share-7", MissingImage, "is not there"),
    "setuid": (lambda root: remounted(root, "suid"), "share-7", ShareRefused, "without nosuid"),
    "devices": (lambda root: remounted(root, "dev"), "share-7", ShareRefused, "without nodev"),
    "registered, then a link": (
        lambda root: registered(root, then=is_link_by_now),
        "share-5",
        ShareRefused,
        "way/theirs .* is a link",
    ),
    "registered, then gone": (
        lambda root: registered(root, then=lambda top: (top / "theirs").rmdir()),
        "share-5",
        MissingImage,
        "not there",
    ),
    "registered, then not for others": (
        lambda root: registered(root, then=lambda top: top.chmod(0o700)),
        "share-5",
        ShareRefused,
        "way on .* lets no others pass",
    ),
    "registered, then ours": (
        lambda root: registered(root, then=lambda top: (top / ".semishared").mkdir()),
        "share-5",
        RestrictedPath,
        "which is ours",
    ),
    "registered, setuid": (
        lambda root: registered(root, "nodev"),
        "share-5",
        ShareRefused,
        "way/theirs .* without nosuid",
    ),
    "registered, devices": (
        lambda root: registered(root, "nosuid"),
        "share-5",
        ShareRefused,
        "way/theirs .* without nodev",
    ),
    "nobody's users": (
        lambda root: (root / ".semishared/.uids/3").unlink(),
        "share-7",
        BadRecord,
        "which users",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_given_to_no_guest(root: Path, name: str) -> None:
    change, source, error, said = CASES[name]
    change(root)
    path = source if source.startswith("/") else f"{root}/{source}"
    with pytest.raises(error, match=said):
        attached.check(5 if source == "share-5" else 7, path)
    # libvirt, or whoever, asks for the same: no daemon is there then.
    if name != "another image's":
        argv = [f"{VMM}/virtiofsd", "--fd=0", "-o", f"source={path}"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 1 and "SS" in done.stderr, done.stderr


def test_each_share_has_the_users_of_its_owner(root: Path) -> None:
    assert [attached.check(image, f"{root}/share-{image}")[:2] for image in (7, 8)] == [
        (first_uid(3), ""),
        (first_uid(4), ""),
    ]


def test_a_share_has_to_be_of_the_root_and_the_image_that_oned_means(root: Path, tmp_path: Path) -> None:
    """Another datastore's root, which a host has mounted there, has a share of that number, too: of somebody
    else.
    """
    registered(root)
    for image, directory in ((7, ""), (5, f"{root.parent}/way/theirs")):
        path = f"{root}/share-{image}"
        assert (
            attached.check(image, path, MARKER, 1)
            == attached.check(image, path)
            == (first_uid(3), directory, False)
        )
        with pytest.raises(OtherStore, match="another datastore's"):
            attached.check(image, path, MARKER[::-1], 1)
        with pytest.raises(ShareRefused, match=f"of another image {image}"):
            attached.check(image, path, MARKER, 2)


def test_a_directory_may_be_its_users_alone_and_the_way_to_it_nobodys(root: Path) -> None:
    """Deploy asks as the drivers' user, who is none of them."""
    registered(root)
    way = root.parent / "way"
    os.chown(way / "theirs", first_uid(3), first_uid(3))
    (way / "theirs").chmod(0o700)

    def asked() -> None:
        os.seteuid(65534)
        try:
            os.close(opened(f"{way}/theirs"))
        finally:
            os.seteuid(0)

    asked()
    # Its group is that of who asks.
    way.chmod(0o701)
    with pytest.raises(ShareRefused, match="way on .* lets not everybody pass"):
        asked()


def test_what_a_guest_calls_as_it_likes_closes_a_directory_to_nobody(root: Path) -> None:
    registered(root)
    theirs, uid = root.parent / "way/theirs", first_uid(3)
    (theirs / "open").mkdir()
    os.chown(theirs / "open", uid, uid)
    # It renames what others have put there, too.
    (theirs / "open/public").mkdir()
    script = "cd $1/open && mv public .semishared && mkdir in && mkdir in/.semishared"
    run(
        "setpriv",
        "--reuid",
        str(uid),
        "--regid",
        str(uid),
        "--clear-groups",
        "sh",
        "-euc",
        script,
        "sh",
        theirs,
    )
    for directory in (theirs, theirs / "open", theirs / "open/in"):
        os.close(opened(str(directory)))
    assert attached.check(5, f"{root}/share-5").directory == str(theirs)
    (theirs / ".semishared").touch()
    with pytest.raises(RestrictedPath, match=f"{theirs}, which is ours"):
        opened(f"{theirs}/open/in")


def test_deploy_compares_it_with_what_the_context_has_noted(root: Path, tmp_path: Path) -> None:
    vm_dir, host = tmp_path / "7", on_host.Work()
    (vm_dir / ".semishared").mkdir(parents=True)
    check = CheckShare(7, f"{root}/share-7", False, str(vm_dir))
    # A VM whose context came before there was such a note.
    carry_out(check, host)
    for roots, refused in (
        ({"7": [MARKER, 1]}, ""),
        ({"8": ["f" * 32, 1]}, ""),
        ({"7": ["f" * 32, 1]}, "another"),
        ({"7": [MARKER, 9]}, "another"),
    ):
        on(NoteClients(7, str(vm_dir), (), roots))
        with pytest.raises(SemisharedError, match=refused) if refused else nullcontext():
            carry_out(check, host)
    # As one of before has it.
    (vm_dir / ".semishared/clients.json").write_text('{"version": 1, "disks": [3]}')
    carry_out(check, host)
    assert carry_out(ReadClients(str(vm_dir)), host) == [3]
    for bad in (
        '{"version": 1, "disks": [], "roots": [7]}',
        '{"version": 1, "disks": [], "roots": {"7": 1}}',
    ):
        (vm_dir / ".semishared/clients.json").write_text(bad)
        with pytest.raises(BadRecord, match="no note"):
            carry_out(check, host)


def test_who_may_read_alone_is_said_by_the_image_and_not_by_the_vm(root: Path, tmp_path: Path) -> None:
    """DISK of a VM is any user's to write. oned is asked of the image before a boot; without CONTEXT what it
    said at first holds.
    """
    vm_dir, host = tmp_path / "7", on_host.Work()
    (vm_dir / ".semishared").mkdir(parents=True)
    on(share_steps.MakeShare(Tree("plain", str(root), MARKER), Share(9, 3, 1, 8 * MiB, readonly=True)))
    registered(root)

    def given(image: int, readonly: bool = False) -> tuple[str, bool]:
        check = CheckShare(image, f"{root}/share-{image}", readonly, str(vm_dir))
        program, is_registered = carry_out(check, host)
        return os.path.basename(program), is_registered

    assert [given(image) for image in (7, 9, 5)] == [
        ("virtiofsd", False),
        ("virtiofsd_read_only", False),
        ("virtiofsd", True),
    ]
    assert given(7, readonly=True) == ("virtiofsd_read_only", False)
    # Since they were made one has become read-only, and one may be written to.
    on(NoteClients(7, str(vm_dir), (), {"7": [MARKER, 1, True], "9": [MARKER, 1], "5": ["", 1, True]}))
    assert [given(image)[0] for image in (7, 9, 5)] == [
        "virtiofsd_read_only",
        "virtiofsd",
        "virtiofsd_read_only",
    ]
    assert given(9, readonly=True)[0] == "virtiofsd_read_only"


@contextmanager
def daemon(name: str, *words: str, vmm: Path = VMM) -> Iterator[subprocess.Popen[str]]:
    """Start one as libvirt does, which leaves it its pidfile open for writing, and locked (virpidfile.c)."""
    with tempfile.NamedTemporaryFile() as pidfile, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{os.urandom(8).hex()}")
        listening.listen(1)
        argv = [f"{vmm}/{name}", f"--fd={listening.fileno()}", *words]
        process = subprocess.Popen(
            argv,
            pass_fds=[listening.fileno(), pidfile.fileno()],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: fcntl.lockf(pidfile, fcntl.LOCK_EX | fcntl.LOCK_NB, 1),
        )
        try:
            until = time.monotonic() + 30
            while process.poll() is None and not is_daemon(process) and time.monotonic() < until:
                time.sleep(0.05)
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert held_by_another(pidfile)
            yield process
        finally:
            process.kill()
            process.wait()


def held_by_another(file: IO[bytes]) -> bool:
    """Tell whether libvirt would find a pidfile locked, and so its daemon alive."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    except BlockingIOError:
        return True
    return False


def written(process: subprocess.Popen[str]) -> list[str]:
    """Return the regular files that a process has open for writing."""
    found = []
    for at in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            flags = int((at.parents[1] / "fdinfo" / at.name).read_text().split("flags:")[1].split()[0], 8)
            if stat.S_ISREG(at.stat().st_mode) and flags & os.O_ACCMODE != os.O_RDONLY:
                found.append(str(at.readlink()))
        except FileNotFoundError:
            continue  # closed since the list was read
    return found


def is_daemon(process: subprocess.Popen[str]) -> bool:
    return Path(f"/proc/{process.pid}/exe").resolve().name == "virtiofsd"


@pytest.mark.parametrize("name", ["virtiofsd", "virtiofsd_read_only"])
def test_the_process_that_libvirt_has_started_is_the_daemon_and_no_real_root_is_left(
    root: Path, name: str
) -> None:
    uid = str(first_uid(4))
    with daemon(name, "-o", f"source={root}/share-8,xattr,posix_lock,flock,sandbox=namespace") as process:
        proc = Path(f"/proc/{process.pid}")
        assert (
            (proc / "uid_map").read_text().split()
            == (proc / "gid_map").read_text().split()
            == ["0", uid, "65536"]
        )
        assert "\t".join(["Uid:", *[uid] * 4]) in (proc / "status").read_text()
        assert written(process) == []
        assert not (proc / "task" / str(process.pid) / "children").read_text()
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
        own = [row[5].split(",") for row in mounts if row[4] == f"{root}/share-8"]
        assert own == ([] if name == "virtiofsd" else [own[0]])
        assert all({"ro", "nosuid", "nodev"} <= set(options) for options in own)


def test_where_the_drivers_are_their_users_as_on_hosts_the_daemon_is_the_same(root: Path) -> None:
    """It asks as that user, as root of a host may be nobody for a server of NFS (nfs/test_shares.py), and is
    root again.
    """
    drivers = root.parent / "drivers"
    for name in ("lib", "vmm"):
        shutil.copytree(VMM.parent / name, drivers / name, symlinks=True)
    for path in (drivers, root / ".semishared"):
        run("chown", "-Rh", "9869:9869", path)
    run("chown", "9869:9869", root)
    uid = str(first_uid(4))
    try:
        with daemon(
            "virtiofsd", "-o", f"source={root}/share-8,sandbox=namespace", vmm=drivers / "vmm"
        ) as process:
            assert "\t".join(["Uid:", *[uid] * 4]) in Path(f"/proc/{process.pid}/status").read_text()
            assert Path(f"/proc/{process.pid}/uid_map").read_text().split() == ["0", uid, "65536"]
            assert written(process) == []
    finally:
        shutil.rmtree(drivers)


@pytest.mark.parametrize("name", ["virtiofsd", "virtiofsd_read_only"])
def test_a_directory_that_was_there_before_is_what_the_daemon_has_and_no_other_process_sees_it_there(
    root: Path, name: str
) -> None:
    registered(root)
    theirs = root.parent / "way/theirs"
    (theirs / "below").mkdir()
    run("mount", "-t", "tmpfs", "below", theirs / "below")
    try:
        (theirs / "below/secret").touch()
        assert attached.check(5, f"{root}/share-5") == (first_uid(3), str(theirs), False)
        with daemon(name, "-o", f"source={root}/share-5,xattr,sandbox=namespace") as process:
            proc = Path(f"/proc/{process.pid}")
            assert (proc / "uid_map").read_text().split() == ["0", str(first_uid(3)), "65536"]
            mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
            own = [(row[3], set(row[5].split(","))) for row in mounts if row[4] == f"{root}/share-5"]
            assert own and all(at == "/theirs" and {"nosuid", "nodev"} <= options for at, options in own)
            assert ("ro" in own[-1][1]) == (name != "virtiofsd")
            assert not [row for row in mounts if row[4].startswith(f"{root}/share-5/")]
            assert not os.listdir(root / "share-5")
    finally:
        run("umount", theirs / "below")


@pytest.mark.parametrize(
    "words",
    [
        ["-o", "xattr"],
        ["-o", "source=/a,source=/b"],
        ["-o", "source=/a", "--shared-dir", "/b"],
        ["--shared-dir"],
        [],
    ],
)
def test_arguments_of_none_or_two_directories_are_refused(words: list[str]) -> None:
    done = subprocess.run(
        [VMM / "virtiofsd", *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1 and ("SS001" in done.stderr or "SS175" in done.stderr), done.stderr


def test_the_daemon_in_rust_is_not_given_the_locks_that_it_ends_at() -> None:
    words = ["--fd=3", "-o", "source=/srv/shares/share-7,xattr,posix_lock,flock,sandbox=namespace"]
    names = "xattrmap=:bad:all:ceph.:ceph.::ok:all:::"
    assert virtiofsd.understood(QEMUS, words) == [*words, "-o", names]
    for program in set(DAEMONS) - {QEMUS}:
        assert virtiofsd.understood(program, words) == [
            "--fd=3",
            "-o",
            "source=/srv/shares/share-7,xattr,sandbox=namespace",
            f"--{names}",
        ]


def test_who_is_not_root_becomes_no_daemon(root: Path) -> None:
    # Others than root may not be let pass to where the checkout lies.
    script = 'mount --bind "$1" /srv; exec setpriv --reuid 65534 --clear-groups /srv/vmm/virtiofsd -o "$2"'
    argv = ["unshare", "--mount", "sh", "-euc", script, "sh", str(VMM.parent), f"source={root}/share-7"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "libvirt starts" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("echo 0 >/proc/sys/user/max_user_namespaces", "unshare: No space left on device"),
        # Nobody but the host itself has the owner's users: the map cannot be written.
        (
            "",
            f"no user namespace for the users {first_uid(3)} to {first_uid(4) - 1}: the map could "
            f"not be written",
        ),
    ],
    ids=["no-namespaces", "no-map"],
)
def test_without_a_namespace_and_its_map_there_is_no_daemon(root: Path, before: str, said: str) -> None:
    """It would be root of the host."""
    script = f'{before}\nexec "$@"'
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{os.urandom(8).hex()}")
        listening.listen(1)
        argv = [
            "unshare",
            "--user",
            "--map-root-user",
            "sh",
            "-euc",
            script,
            "sh",
            f"{VMM}/virtiofsd",
            f"--fd={listening.fileno()}",
        ]
        argv += ["-o", f"source={root}/share-7,sandbox=namespace"]
        done = subprocess.run(
            argv, pass_fds=[listening.fileno()], capture_output=True, text=True, check=False, timeout=60
        )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and not done.stdout and said in line and "SS" in line, done
