# SPDX-License-Identifier: Apache-2.0
"""install.sh and what it puts beside the drivers: pages of the documentation, manual pages, completion."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import small_checkout
from tools.test_install import ROOT, STOCK, WHOLE, snapshot

SHARE = "usr/local/share"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the root of a machine with an OpenNebula as packages install it."""
    shutil.copytree(STOCK, tmp_path / "root/var/lib/one/remotes")
    for folder in ("tm", "datastore"):
        (tmp_path / "root/var/lib/one/remotes" / folder).mkdir(exist_ok=True)
    (tmp_path / "root" / SHARE / "man").mkdir(parents=True)
    return tmp_path / "root"


def install(root: Path, *options: str, script: Path = WHOLE, code: int = 0) -> str:
    done = subprocess.run(
        [str(script), "--root", str(root), "--no-config", *options],
        env={"PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code and not done.stderr, done.stderr
    return done.stdout


@pytest.mark.fault(80, "install.sh puts manual pages, completion and documents in, and takes all of it out")
def test_all_of_it_is_put_in_and_taken_out_to_the_byte(root: Path) -> None:
    (root / SHARE / "man/man1").mkdir()
    (root / SHARE / "man/man1/other.1").write_text("another's")
    before = snapshot(root)
    install(root)
    # Rules and dashboards are for another machine, which the administrator copies them to.
    own = ("man", "bash-completion", "zsh", "fish")
    for source in (path for name in own for path in (ROOT / "share" / name).rglob("*") if path.is_file()):
        target = root / SHARE / source.relative_to(ROOT / "share")
        assert target.read_bytes() == source.read_bytes() and target.stat().st_mode & 0o777 == 0o644
    package = root / "var/lib/one/remotes/lib/semishared"
    for page in (ROOT / "docs").rglob("*.md"):
        target = package / "docs" / page.relative_to(ROOT / "docs")
        assert target.read_bytes() == page.read_bytes() and target.stat().st_mode & 0o777 == 0o644
    done = subprocess.run(
        [str(package / "semishared"), "explain", "docs/how-to/nfs.md"], capture_output=True, text=True
    )
    assert done.stdout == (ROOT / "docs/how-to/nfs.md").read_text() and not done.returncode
    assert "nothing to do" in install(root)
    installed = snapshot(root)
    install(root, "--dry-run", "--uninstall")
    assert snapshot(root) == installed
    install(root, "--uninstall")
    assert snapshot(root) == before


def test_what_an_older_version_had_goes_and_a_package_of_the_distribution_brings_its_own(root: Path) -> None:
    install(root)
    older = root / SHARE / "man/man1/semishared-older.1"
    older.write_text("of a verb that is gone")
    assert f"remove 1 files of semishared from {older.parent}" in install(root)
    assert not older.exists() and (older.parent / "semishared-gc.1").exists()
    # install.sh of a package is started below /usr/share/semishared, where neither docs/ nor share/ are.
    install(root, script=small_checkout.script())
    assert not list((root / SHARE).rglob("*semishared*"))


def test_a_machine_without_such_a_directory_gets_none(root: Path) -> None:
    shutil.rmtree(root / "usr")
    install(root)
    assert not (root / "usr").exists()
    (root / SHARE).mkdir(parents=True)
    one = root / "home/one/var/remotes"
    shutil.copytree(root / "var/lib/one/remotes", one)
    install(root, "--remotes", str(one))
    assert not list((root / SHARE).iterdir())
