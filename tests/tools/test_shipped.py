# SPDX-License-Identifier: Apache-2.0
"""An upgrade replaces the semishared.conf that was shipped, and leaves an administrator's as it is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Callable

import pytest

import small_checkout
from semishared.install import shipped

ROOT = Path(__file__).resolve().parents[2]
STOCK = ROOT / "tests" / "lab" / "stock"


class Site:
    """A remotes directory, and two versions that differ in the semishared.conf they ship."""

    def __init__(self, root: Path) -> None:
        self.remotes = root / "remotes"
        shutil.copytree(STOCK, self.remotes)
        self.older, self.newer = root / "older", root / "newer"
        for checkout in (self.older, self.newer):
            small_checkout.lay_out(checkout)
        self._shipped(self.older).write_text(self._shipped(self.newer).read_text() + "[old]\nkey = 1\n")
        with (self.older / "lib/semishared/units.py").open("a") as file:
            file.write("# of an older package\n")
        self.conf, self.note = self.remotes / shipped.CONF, self.remotes / shipped.NOTE

    @staticmethod
    def _shipped(checkout: Path) -> Path:
        return checkout / shipped.CONF

    @property
    def new(self) -> str:
        return self._shipped(self.newer).read_text()

    def install(self, checkout: Path, *options: str, code: int = 0, **env: str) -> str:
        done = subprocess.run(
            [str(checkout / "install.sh"), "--remotes", str(self.remotes), *options],
            env={"PATH": os.environ["PATH"], **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stdout


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.fault(79, "an unchanged `semishared.conf` is that of the new version after an upgrade")
def test_untouched_configuration_is_replaced(site: Site) -> None:
    site.install(site.older)
    site.conf.chmod(0o640)
    assert f"would replace {site.conf}" in site.install(site.newer, "--dry-run")
    assert "[old]" in site.conf.read_text()
    said = site.install(site.newer)
    assert f"replace {site.conf}" in said and "it was changed" not in said
    assert site.conf.read_text() == site.new and site.conf.stat().st_mode & 0o777 == 0o640
    assert "nothing to do" in site.install(site.newer)


@pytest.mark.fault(
    79, "what an administrator has changed in `semishared.conf` is there after any number of upgrades"
)
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + "# mine\n",
        lambda text: text.replace("[images]", "[images]\n"),
        lambda text: "".join(line for line in text.splitlines(True) if "scripts_dir" not in line),
        lambda text: "",
    ],
    ids=["more", "an empty line", "less", "nothing at all"],
)
def test_changed_configuration_stays(site: Site, change: Callable[[str], str]) -> None:
    site.install(site.older)
    mine = change(site.conf.read_text())
    site.conf.write_text(mine)
    for checkout in (site.newer, site.older, site.newer, site.newer):
        assert "it was changed" in site.install(checkout)
        assert site.conf.read_text() == mine
    site.install(site.newer, "--uninstall")
    assert site.conf.read_text() == mine and not site.note.exists()


def test_what_was_shipped_before_and_is_put_back_by_hand_stays(site: Site) -> None:
    """As dpkg has it: only what was shipped last is ours."""
    site.install(site.older)
    old = site.conf.read_text()
    site.conf.write_text(old + "# mine\n")
    site.install(site.newer)
    site.conf.write_text(old)
    site.install(site.newer)
    assert site.conf.read_text() == old


def test_scripts_dir_is_kept_where_all_else_is_replaced(site: Site) -> None:
    site.install(site.older)
    site.conf.write_text(site.conf.read_text().replace("= /var/tmp/one", "= /srv/one"))
    site.install(site.newer)
    assert site.conf.read_text() == site.new.replace("= /var/tmp/one", "= /srv/one")


def test_link_of_an_administrator_is_not_replaced(site: Site, tmp_path: Path) -> None:
    site.install(site.older)
    site.conf.rename(tmp_path / "elsewhere.conf")
    site.conf.symlink_to(tmp_path / "elsewhere.conf")
    assert "it was changed" in site.install(site.newer)
    assert site.conf.is_symlink() and "[old]" in (tmp_path / "elsewhere.conf").read_text()


@pytest.mark.fault(79, "an untouched `semishared.conf` of 0.1.0, which left no note, is replaced too")
def test_versions_without_a_note_are_known(site: Site) -> None:
    """All that the repository has had, where its history is there."""
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    words = [*git, "log", "--format=%H", "16cb30ac", "--", shipped.CONF]
    commits = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
    if not commits:
        pytest.skip("no history in this clone")
    for commit in commits:
        show = [*git, "show", f"{commit}:{shipped.CONF}"]
        text = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        assert shipped.is_untouched(text, ""), commit
        assert not shipped.is_untouched(text + "# mine\n", ""), commit
    site.install(site.newer)
    site.conf.write_text(text)
    site.note.unlink()
    site.install(site.newer)
    assert site.conf.read_text() == site.new


def test_killed_between_package_and_configuration_the_next_run_ends_it(site: Site, tmp_path: Path) -> None:
    """The package is the new one then, and the note still that of the old configuration."""
    trace = tmp_path / "trace"
    site.install(site.older)
    shutil.copytree(site.remotes, tmp_path / "before", symlinks=True)
    site.install(site.newer, SEMISHARED_TRACE=str(trace))
    names = [line.partition(" ")[2] for line in trace.read_text().splitlines()]
    assert names.index("swapped lib/semishared") < names.index(f"put {shipped.CONF}")
    assert f"put {shipped.CONF}" in names and f"put {shipped.NOTE}" in names
    for number, name in enumerate(names, 1):
        shutil.rmtree(site.remotes)
        shutil.copytree(tmp_path / "before", site.remotes, symlinks=True)
        site.install(site.newer, code=-signal.SIGKILL, SEMISHARED_KILL_AT=str(number))
        site.install(site.newer)
        assert site.conf.read_text() == site.new, name
        assert site.note.read_text().strip() == shipped.digest(site.new), name


def test_uninstall_leaves_nothing_of_an_untouched_one(site: Site) -> None:
    before = sorted(filter(Path.is_file, site.remotes.rglob("*")))
    site.install(site.older)
    site.install(site.newer, "--uninstall")
    assert sorted(filter(Path.is_file, site.remotes.rglob("*"))) == before
