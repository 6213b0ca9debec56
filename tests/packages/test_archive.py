# SPDX-License-Identifier: Apache-2.0
"""`make dist`: the same commit gives the same bytes, and says which commit it is."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from packages.packaged import ROOT
from semishared import VERSION

NAME = f"semishared-{VERSION}"


def clone(target: Path, commit: str = "HEAD") -> Path:
    git = ["git", "-c", "safe.directory=*"]
    subprocess.run([*git, "clone", "--quiet", "--no-checkout", str(ROOT), str(target)], check=True)
    subprocess.run([*git, "-C", str(target), "checkout", "--quiet", "--detach", commit], check=True)
    return target


def made(checkout: Path, **env: str) -> bytes:
    subprocess.run(
        ["sh", "-c", "umask ${MASK-022}; exec packaging/dist.sh"],
        cwd=checkout,
        env={"PATH": os.environ["PATH"], "HOME": "/", **env},
        check=True,
        capture_output=True,
    )
    return (checkout / f"build/dist/{NAME}.tar.xz").read_bytes()


@pytest.mark.fault(79, "two archives of one commit are the same bytes, whoever makes them where")
def test_two_clones_make_the_same_bytes(tmp_path: Path) -> None:
    one, two = clone(tmp_path / "one"), clone(tmp_path / "elsewhere-with-a-longer-name")
    for path in sorted(two.rglob("*")):
        os.utime(path, (0, 0), follow_symlinks=False)
    (two / "README.md").write_text("not committed\n")
    first = made(one, TZ="UTC")
    assert first == made(two, TZ="Pacific/Kiritimati", MASK="077", LC_ALL="C")
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=one / "build/dist", check=True)
    commit = subprocess.run(
        ["git", "-C", str(one), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout
    with tarfile.open(one / f"build/dist/{NAME}.tar.xz") as archive:
        members = archive.getmembers()
        said = archive.extractfile(f"{NAME}/COMMIT")
        assert said and said.read().decode() == commit
    assert len({member.mtime for member in members}) == 1 and {member.uid for member in members} == {0}
    assert [member.name for member in members if not member.name.startswith(NAME)] == []
    assert not [member.name for member in members if "/build/" in member.name]


def test_an_archive_makes_none(tmp_path: Path) -> None:
    """Its commit would be that of a repository around it."""
    checkout = clone(tmp_path / "clone")
    made(checkout)
    subprocess.run(["tar", "-xf", f"build/dist/{NAME}.tar.xz"], cwd=checkout, check=True)
    done = subprocess.run(
        ["packaging/dist.sh"], cwd=checkout / NAME, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stderr.startswith("dist: ")
