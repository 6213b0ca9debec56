# SPDX-License-Identifier: Apache-2.0
"""The same shares given by the virtiofsd in Rust, which Debian 12 does not have: built here by cargo, at
length only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import caches
from semishared.model.share.share import first_uid
from shares.conftest import loop_of
from shares.guests import Shares

VERSION = "1.14.0"
FIRST = first_uid(5)
LIBRARIES = ("libcap-ng.so.0", "libseccomp.so.2")
BESIDE = """
mkdir /mnt/libexec
mount --bind /usr/libexec /mnt/libexec
mount -t tmpfs -o mode=755 tmpfs /usr/libexec
ln -s /mnt/libexec/* /usr/libexec
"""
"""Let a host have one thing more there: sudo has its libraries below."""
CARGO = shutil.which("cargo", path=f"{os.environ.get('PATH', '')}:{Path.home()}/.cargo/bin")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root"),
    pytest.mark.skipif(not CARGO, reason="virtiofsd in Rust did not run: no cargo here to build it"),
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the daemon, built once and kept; it links to what QEMU's is linked to, for which Debian's
    packages have no plain names.
    """
    kept = caches.CACHE / f"virtiofsd-{hashlib.sha256(VERSION.encode()).hexdigest()[:16]}"
    if not kept.exists():
        top = tmp_path_factory.mktemp("cargo")
        for library in LIBRARIES:
            (top / f"{library.partition('.so')[0]}.so").symlink_to(Path("/usr/lib/x86_64-linux-gnu", library))
        assert CARGO
        words = [CARGO, "install", "virtiofsd", "--version", VERSION, "--locked", "--root", str(top)]
        path = f"{Path(CARGO).parent}:{os.environ['PATH']}"
        env = {**os.environ, "LIBRARY_PATH": str(top), "CARGO_TARGET_DIR": str(top / "target"), "PATH": path}
        subprocess.run(words, check=True, env=env, timeout=1800)
        caches.put(kept, (top / "bin/virtiofsd").read_bytes())
    return kept


@pytest.fixture()
def shares(btrfs: Path, daemon: Path) -> Iterator[Shares]:
    with Shares.up(loop_of(btrfs)) as up:
        h1 = up.cloud.lab.hosts[0]
        h1.run(["sh", "-euc", BESIDE], user="root")
        place = h1.path("/usr/libexec/virtiofsd")
        shutil.copyfile(daemon, place)
        place.chmod(0o755)
        yield up


def test_guests_have_their_share_and_the_host_its_peace(shares: Shares) -> None:
    both, read = shares.image("both", "32M", uid=5), shares.image("read", "16M", uid=5)
    one, other = shares.deploy("one", both), shares.create("other", both, read)
    shares.oned.vm(other).disks[2]["READONLY"] = "YES"
    shares.oned.vm_deploy(other, "h1", 101)
    first, second = shares.mounted(one), shares.mounted(other)
    h1 = shares.cloud.lab.hosts[0]
    programs = [
        h1.run(["readlink", f"/proc/{pid}/exe"], user="root").stdout.strip() for pid in shares.daemons()
    ]
    assert programs and all(program.endswith(b"libexec/virtiofsd") for program in programs)
    assert {text.split()[1] for name in ("uid_map", "gid_map") for text in shares.of_daemons(name)} == {
        str(FIRST)
    }
    assert first.run("echo first >/both/file && chown 1000 /both/file")[0] == 0
    assert second.run("sleep 1; cat /both/file; stat -c %u /both/file") == (0, "first\n1000\n")
    assert (shares.path(both) / "file").stat().st_uid == FIRST + 1000
    assert first.run("cp /bin/busybox /both/id; chmod 6755 /both/id; stat -c %a /both/id") == (0, "6755\n")
    assert (shares.path(both) / "id").stat().st_uid == FIRST
    assert first.run("mknod /both/disk b 7 0")[1] == "mknod: /both/disk: Operation not permitted\n"
    assert first.run("chown 70000 /both/file")[1] == "chown: /both/file: Invalid argument\n"
    assert (
        first.set_attribute("/both/file", "user.mine", b"1")
        == first.attribute("/both/file", "user.mine")
        == ""
    )
    assert first.set_attribute("/both/file", "ceph.quota.max_bytes", b"0") == "Operation not permitted"
    assert first.attribute("/both/file", "ceph.quota.max_bytes") == "No data available"
    assert "Disk quota exceeded" in first.run("dd if=/dev/urandom of=/both/big bs=1M count=64; sync", 240)[1]
    assert "Read-only file system" in second.run("mount -o remount,rw /read; echo >/read/file")[1]
    # It has no locks: each guest's are its own.
    for how in ("posix", "flock"):
        assert [guest.lock("/both/id", how) for guest in (first, second)] == ["", ""]
    for vm in (one, other):
        shares.cloud.terminate(vm)
    assert shares.daemons() == []
