# SPDX-License-Identifier: Apache-2.0
"""install.sh against whole front-ends in a directory: every configuration, twice, and interrupted anywhere.

That it brings all of the package, and how it starts, is for test_install.py: here it is that of a small
checkout, mostly forked.
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Dict, Tuple

import pytest

import small_checkout
from configurations import REFUSED, SOUND, VERSIONS, oned_conf, oned_reads, vmm_execrc
from lab import forks
from semishared.errors import CannotInstall
from semishared.install import timer, tree
from semishared.install.front_end import LIMITS, check_version
from semishared.install.main import main

ROOT = Path(__file__).resolve().parents[2]
STOCK = ROOT / "tests" / "lab" / "stock"
MAIN = "lib/semishared/install/main.py"
Tree = Dict[str, Tuple[int, int, int, bytes]]


class FrontEnd:
    """An OpenNebula front-end below a directory, as the packages lay it out or self-contained."""

    def __init__(self, root: Path, packaged: bool = True) -> None:
        self.root, self.forks = root, True
        self.etc = root / ("etc/one" if packaged else "etc")
        self.remotes = root / ("var/lib/one/remotes" if packaged else "var/remotes")
        shutil.copytree(STOCK, self.remotes)
        (self.remotes / "tm/ssh").mkdir(parents=True)
        (self.etc / "vmm_exec").mkdir(parents=True)
        self.conf, self.execrc = self.etc / "oned.conf", self.etc / "vmm_exec/vmm_execrc"
        self.conf.write_text(oned_conf())
        self.execrc.write_text(vmm_execrc())
        for path in (self.conf, self.execrc):
            path.chmod(0o640)

    def copy(self, root: Path) -> FrontEnd:
        """Return one more, as this one is."""
        shutil.copytree(self.root, root, symlinks=True)
        other = copy.copy(self)
        other.root, other.etc, other.remotes, other.conf, other.execrc = (
            root / path.relative_to(self.root)
            for path in (self.root, self.etc, self.remotes, self.conf, self.execrc)
        )
        return other

    def run(self, *options: str, code: int = 0, **env: str) -> str:
        where = ["--root", str(self.root)] if self.etc.name == "one" else []
        script = small_checkout.script()
        words = [*forks.python(script.parent), str(script.parent / MAIN)] if self.forks else [str(script)]
        done = subprocess.run(
            [*words, *where, *options],
            cwd="/",
            env={"PATH": os.environ["PATH"], **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        if code > 0:
            said = [line for line in done.stderr.splitlines() if ": warning: " not in line]
            assert len(said) == 1 and said[0].startswith("install.sh: ")
            return said[0]
        return done.stdout + done.stderr

    def tree(self) -> Tree:
        """Return everything there is: mode, owner, content; byte code and times do not count, nor where all
        of it is.
        """
        found = {}
        for path in sorted(self.root.rglob("*")):
            if "__pycache__" in str(path):
                continue
            status = path.lstat()
            content = (
                path.read_bytes()
                if path.is_file()
                else os.readlink(path).encode()
                if path.is_symlink()
                else b""
            )
            found[str(path.relative_to(self.root))] = (
                status.st_mode,
                status.st_uid,
                status.st_gid,
                content.replace(bytes(self.root), b""),
            )
        return found

    def without_backups(self) -> Tree:
        return {name: what for name, what in self.tree().items() if ".semishared-2" not in name}


@pytest.fixture
def front_end(tmp_path: Path) -> FrontEnd:
    return FrontEnd(tmp_path / "root")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> FrontEnd:
    """Return a front-end with the drivers in place, for tests that only look at configuration."""
    front_end = FrontEnd(tmp_path_factory.mktemp("installed") / "root")
    front_end.run("--no-config")
    return front_end


@pytest.mark.parametrize("name", SOUND)
def test_every_configuration_twice(installed: FrontEnd, name: str) -> None:
    installed.conf.write_bytes(SOUND[name].encode("utf-8", "surrogateescape"))
    installed.execrc.write_text(vmm_execrc())
    said = installed.run()
    assert "onehost sync --force" in said and "restart" in said and "setup --apply" in said
    text = installed.conf.read_bytes().decode("utf-8", "surrogateescape")
    assert any(value.get("NAME") == "semishared" for key, value in oned_reads(text) if key == "TM_MAD_CONF")  # type: ignore[union-attr]
    assert "kvm-semishared" in installed.execrc.read_text()
    after = installed.tree()
    assert "nothing to do" in installed.run()
    assert installed.tree() == after


@pytest.mark.parametrize(
    "name",
    [
        "stock 7.4",
        "no newline at the end",
        "another add-on",
        "migrate and more on the front-end",
        "not UTF-8",
    ],
)
def test_out_again_to_the_byte(front_end: FrontEnd, name: str) -> None:
    front_end.conf.write_bytes(SOUND[name].encode("utf-8", "surrogateescape"))
    before = front_end.tree()
    front_end.run()
    front_end.run("--uninstall")
    assert front_end.tree() == before


@pytest.mark.parametrize("name", REFUSED)
def test_refused_configurations_leave_everything(front_end: FrontEnd, name: str) -> None:
    front_end.conf.write_bytes(REFUSED[name][0].encode())
    before = front_end.tree()
    assert REFUSED[name][1] in front_end.run(code=1)
    assert front_end.tree() == before


@pytest.mark.parametrize("version", VERSIONS)
def test_versions(front_end: FrontEnd, version: str) -> None:
    front_end.conf.write_text(oned_conf(version))
    front_end.execrc.write_text(vmm_execrc(version))
    (front_end.remotes / "VERSION").write_text(f"{version}.0\n")
    said = front_end.run()
    found = [line for line in said.splitlines() if "warning: OpenNebula 6.10.0: " in line]
    assert len(found) == (len(LIMITS) + 1 if version == "6.10" else 0)
    assert "semishared" in front_end.conf.read_text()


@pytest.mark.fault(61, "install.sh names what is otherwise on OpenNebula 6.10, and the page has all of it")
def test_limits_of_an_older_opennebula() -> None:
    (*said, page) = check_version((6, 10, 5))
    for word in (
        "first 100 characters",
        "in no log",
        "directories",
        "INCREMENT",
        "PERSISTENT_SNAPSHOTS",
        "probe",
    ):
        assert any(word in line for line in said), word
    path, _, section = page.partition("more: ")[2].partition(", ")
    text = (Path(__file__).resolve().parents[2] / path).read_text()
    assert f"## {section}\n" in text and not any("all else" in line for line in said)


def test_mode_owner_and_links_of_configuration_stay(front_end: FrontEnd) -> None:
    real = front_end.root / "managed.conf"
    front_end.conf.rename(real)
    front_end.conf.symlink_to(real)
    if os.geteuid() == 0:
        os.chown(real, 0, 9869)
    front_end.execrc.chmod(0o604)
    before = real.stat()
    front_end.run()
    after = real.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert front_end.conf.is_symlink() and "semishared" in real.read_text()
    assert front_end.execrc.stat().st_mode & 0o777 == 0o604
    backup = next(front_end.root.glob("managed.conf.semishared-*"))
    assert backup.read_text() == oned_conf() and backup.stat().st_mode == before.st_mode


def test_uninstall_keeps_what_was_changed_since(front_end: FrontEnd) -> None:
    front_end.run()
    front_end.conf.write_text(front_end.conf.read_text().replace("PORT = 2633", "PORT = 2634"))
    said = front_end.run("--uninstall")
    assert front_end.conf.read_text() == oned_conf().replace("PORT = 2633", "PORT = 2634")
    backup = next(front_end.etc.glob("oned.conf.semishared-*"))
    assert backup.read_text() == oned_conf() and f"kept {backup}" in said
    assert said.index("restart") < said.index("onehost sync")


def test_upgrade_of_opennebula_that_brought_its_own_files_again(front_end: FrontEnd) -> None:
    front_end.run()
    after = front_end.without_backups()
    front_end.conf.write_text(oned_conf())
    front_end.execrc.write_text(vmm_execrc())
    assert "edit" in front_end.run()
    assert front_end.without_backups() == after


def test_dry_run_and_diff_change_nothing(front_end: FrontEnd) -> None:
    before = front_end.tree()
    said = front_end.run("--dry-run")
    assert (
        f"would edit {front_end.conf}\n  TM_MAD: semishared into the list -d\n" in said
        and "\n+" not in said
        and "next" not in said
    )
    said = front_end.run("--diff")
    assert '+    ARGUMENTS      = "-t 15 -r 0 semishared -p",' in said and "+LIVE_DISK_SNAPSHOTS" in said
    assert front_end.tree() == before
    front_end.run()
    installed = front_end.tree()
    assert '-    ARGUMENTS      = "-t 15 -r 0 semishared -p",' in front_end.run("--diff", "--uninstall")
    assert front_end.tree() == installed


def test_self_contained(tmp_path: Path) -> None:
    front_end = FrontEnd(tmp_path / "one", packaged=False)
    front_end.forks = False
    before = front_end.tree()
    front_end.run(ONE_LOCATION=str(front_end.root))
    assert "semishared" in front_end.conf.read_text() and (front_end.remotes / "tm/semishared/clone").exists()
    assert "nothing to do" in front_end.run("--remotes", str(front_end.remotes))
    front_end.run("--uninstall", "--force", ONE_LOCATION=str(front_end.root))
    assert front_end.tree() == before


def test_remote_scripts_directory_of_oned_reaches_our_configuration(front_end: FrontEnd) -> None:
    front_end.conf.write_text(oned_conf().replace("/var/tmp/one", '"/srv/one/"'))
    before = front_end.tree()
    front_end.run()
    assert "\nscripts_dir = /srv/one\n" in (front_end.remotes / "etc/semishared.conf").read_text()
    assert "nothing to do" in front_end.run()
    front_end.run("--uninstall")
    assert front_end.tree() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="root gives files away")
def test_root_installs_for_the_owner_of_remotes_and_configuration_stays_roots(front_end: FrontEnd) -> None:
    for path in (front_end.remotes, *front_end.remotes.rglob("*")):
        os.chown(path, 9869, 9869, follow_symlinks=False)
    os.chown(front_end.conf, 0, 9869)
    os.chown(front_end.execrc, 0, 9869)
    front_end.run()
    assert {
        what[1] for name, what in front_end.tree().items() if "remotes/" in name and "semishared" in name
    } == {9869}
    assert front_end.conf.stat().st_uid == 0 and front_end.conf.stat().st_gid == 9869


SYSTEMD, CRON = "etc/systemd/system", "etc/cron.d"
TIMER = {SYSTEMD: ["semishared-detach.service", "semishared-detach.timer"], CRON: ["semishared-detach"]}


@pytest.mark.parametrize("folder", TIMER)
def test_timer_is_made_when_asked_for_stays_in_an_upgrade_and_goes_with_the_rest(
    front_end: FrontEnd, folder: str
) -> None:
    where = front_end.root / folder
    where.mkdir(parents=True)
    before = front_end.without_backups()
    assert f"would make {where}/{TIMER[folder][-1]}" in front_end.run("--detach-timer", "--dry-run")
    assert front_end.without_backups() == before
    assert "install.sh --timers" in front_end.run() and os.listdir(where) == []
    said = front_end.run("--detach-timer")
    assert f"make {where}/{TIMER[folder][-1]}" in said and "systemctl enable" not in said, (
        "it is not this machine's"
    )
    assert sorted(os.listdir(where)) == TIMER[folder]
    texts = [(where / name).read_text() for name in TIMER[folder]]
    assert (
        sum(text.count("/var/lib/one/remotes/lib/semishared/semishared detach --due") for text in texts) == 1
    )
    assert not any(str(front_end.root) in text for text in texts)
    assert {(where / name).stat().st_mode & 0o777 for name in TIMER[folder]} == {0o644}
    for options in ((), ("--detach-timer",)):
        assert "nothing to do" in front_end.run(*options)
    changed = where / TIMER[folder][-1]
    changed.write_text(f"{texts[-1]}# every other night\n")
    older(front_end)
    assert "--timers" not in front_end.run() and "every other night" in changed.read_text()
    assert f"replace {changed}" in front_end.run("--detach-timer") and changed.read_text() == texts[-1]
    if folder == SYSTEMD:
        (where / "timers.target.wants").mkdir()
        (where / "timers.target.wants/semishared-detach.timer").symlink_to("../semishared-detach.timer")
    (where / "other").write_text("")
    assert f"would remove {changed}" in front_end.run("--uninstall", "--dry-run")
    front_end.run("--uninstall")
    assert [path.name for path in where.rglob("*") if not path.is_dir()] == ["other"]


@pytest.mark.fault(
    66, "doctor says that nothing publishes, or that the timer was stopped, and how to have it"
)
def test_timer_is_seen_in_its_files_and_in_what_systemd_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemctl is a script here that answers as the real one; doctor believes the word `active` alone."""
    (tmp_path / "systemctl").write_text('#!/bin/sh\necho "ActiveState=$(cat "${0%/*}/state")"\n')
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    units = timer.units("/var/lib/one/remotes/semishared", "oneadmin")
    for path, text in units.items():
        (tmp_path / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path[1:]).write_text(text)
    assert timer.publishes(str(tmp_path)) and not timer.publishes(f"{tmp_path}/none")
    monkeypatch.setattr(timer, "RUNS", str(tmp_path))
    monkeypatch.setattr(timer, "TIMER", f"{tmp_path}{timer.TIMER}")
    for state, is_stopped in (("active", False), ("inactive", True), ("failed", True)):
        (tmp_path / "state").write_text(state)
        assert timer.is_stopped("") == is_stopped
    # Files of another machine, an init that is not systemd, and a timer of before.
    assert not timer.is_stopped(str(tmp_path))
    monkeypatch.setattr(timer, "RUNS", f"{tmp_path}/none")
    assert not timer.is_stopped("")
    service = tmp_path / timer.SERVICE[1:]
    service.write_text(service.read_text().replace("publish --due", "detach --due"))
    assert not timer.publishes(str(tmp_path))


@pytest.mark.fault(78, "the trail's log is rotated by logrotate as the site wants it, until it goes")
def test_rotation_of_the_trail_is_installed_stays_as_it_is_and_goes(front_end: FrontEnd) -> None:
    where = front_end.root / "etc/logrotate.d"
    front_end.run()
    assert not where.exists(), "there is no logrotate"
    where.mkdir()
    assert f"would make {where}/semishared" in front_end.run("--dry-run") and os.listdir(where) == []
    assert f"make {where}/semishared" in front_end.run()
    text = (where / "semishared").read_text()
    assert text.startswith("/var/log/one/semishared.log {") and "su oneadmin oneadmin" in text
    assert "nothing to do" in front_end.run()
    (where / "semishared").write_text("# kept for ten years\n")
    older(front_end)
    front_end.run()
    assert (where / "semishared").read_text() == "# kept for ten years\n"
    (where / "opennebula").write_text("")
    front_end.run("--uninstall")
    assert os.listdir(where) == ["opennebula"]


@pytest.mark.parametrize("folder", TIMER)
def test_all_timers_are_made_and_go(front_end: FrontEnd, folder: str) -> None:
    where = front_end.root / folder
    where.mkdir(parents=True)
    front_end.run("--timers")
    wanted = {Path(path).name for row in timer.ROWS for path in timer.paths(row)[1:] if f"/{folder}/" in path}
    assert set(os.listdir(where)) == wanted and len(wanted) == len(timer.ROWS) * len(TIMER[folder])
    texts = {name: (where / name).read_text() for name in wanted}
    for name, row in timer.ROWS.items():
        mine = "".join(text for file, text in texts.items() if file.startswith(f"semishared-{name}"))
        for verb in row.verbs:
            assert mine.count(f"/semishared {verb}") == 1, (name, verb)
        assert "IOSchedulingClass=idle" in mine or "ionice -c 3" in mine
        assert f"TimeoutStartSec={row.budget_s}\n" in mine or f"timeout {row.budget_s} " in mine
        assert str(row.jitter_s) in mine
    assert "nothing to do" in front_end.run("--timers")
    front_end.run("--uninstall")
    assert os.listdir(where) == []


def test_units_are_ones_that_systemd_reads_and_cron_has_no_percent_sign(tmp_path: Path) -> None:
    """A `%` ends a command in a crontab."""
    texts = timer.units("/usr/bin/true", "root", tuple(timer.ROWS))
    for path, text in texts.items():
        (tmp_path / os.path.basename(path)).write_text(text)

    def complaints() -> list[str]:
        words = ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return [line for line in done.stderr.splitlines() if str(tmp_path) in line]

    assert complaints() == []
    service = tmp_path / "semishared-gc.service"
    service.write_text(service.read_text().replace("TimeoutStartSec=", "TimeoutStartSec=never"))
    assert complaints() != [], "it says what it does not understand"
    for text in timer.crontab("/usr/bin/true", "oneadmin", tuple(timer.ROWS)).values():
        for line in text.splitlines():
            assert "%" not in line and len(line.split()) > 6
            assert line.split()[5] in ("oneadmin", "root")


def test_timer_that_cannot_be_made_is_refused_before_anything_is_touched(front_end: FrontEnd) -> None:
    before = front_end.tree()
    assert "neither systemd nor" in front_end.run("--detach-timer", code=1)
    (front_end.root / CRON).mkdir()
    assert "not allowed with" in front_end.run("--detach-timer", "--uninstall", code=1)
    (front_end.root / CRON).rmdir()
    assert front_end.tree() == before
    for command, user in (
        ("/a b/semishared", "oneadmin"),
        ("/a/semi%h", "oneadmin"),
        ("/a/semishared", "one;admin"),
    ):
        with pytest.raises(CannotInstall, match="no timer can name"):
            timer.units(command, user)
        with pytest.raises(CannotInstall, match="no timer can name"):
            timer.crontab(command, user)


def test_systemd_is_told_of_a_timer_on_this_machine_alone(front_end: FrontEnd) -> None:
    texts = timer.units("/semishared", "oneadmin")
    lines = [command.line() for command in timer.Timer("", texts, ()).commands()]
    assert lines == [
        "as root: systemctl daemon-reload",
        "as root: systemctl enable --now semishared-detach.timer",
    ]
    gone = [command.line() for command in timer.Timer("", {}, timer.PATHS).commands()]
    names = " ".join(f"semishared-{row}.timer" for row in timer.ROWS)
    services, patterns = (names.replace(".timer", word) for word in (".service", ".*"))
    assert gone == [
        f"as root: systemctl stop {names} {services}",
        "as root: systemctl daemon-reload",
        "as root: systemctl reset-failed " + " ".join(f"'{word}'" for word in patterns.split()),
    ]
    texts = timer.units("/semishared", "oneadmin", tuple(timer.ROWS))
    assert timer.Timer("", texts, ()).commands()[1].line() == f"as root: systemctl enable --now {names}"
    assert timer.Timer("", timer.crontab("/semishared", "oneadmin"), ()).commands() == []
    assert timer.Timer("/root", texts, ()).commands() == []


def test_two_installers_at_once(front_end: FrontEnd) -> None:
    front_end.forks = False
    env = {**os.environ, "SEMISHARED_STOP_AT": "2"}
    first = subprocess.Popen(
        [str(small_checkout.script()), "--root", str(front_end.root)], env=env, stdout=subprocess.DEVNULL
    )
    try:
        os.waitpid(first.pid, os.WUNTRACED)
        assert "another install.sh is at work" in front_end.run(code=1)
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.wait() == 0
    assert "nothing to do" in front_end.run()


def older(front_end: FrontEnd) -> None:
    """Make what is installed another version's."""
    (front_end.remotes / "lib/semishared/errors.py").write_text("old = 1\n")
    (front_end.remotes / "tm/semishared/gone").write_text("")
    front_end.conf.write_text(oned_conf())


@pytest.mark.parametrize("what", ["install", "upgrade", "uninstall"])
def test_killed_anywhere_the_second_run_converges(tmp_path: Path, what: str) -> None:
    """After a kill at each step the files are sound, and a second run ends it: as if nobody had been
    killed.
    """
    options = ["--uninstall"] if what == "uninstall" else ["--detach-timer"]
    model = FrontEnd(tmp_path / "model")
    (model.root / SYSTEMD).mkdir(parents=True)
    if what != "install":
        model.run("--detach-timer")
    if what == "upgrade":
        older(model)
    reference = model.copy(tmp_path / "reference")
    reference.run(*options, SEMISHARED_TRACE=str(tmp_path / "trace"))
    ended = reference.without_backups()
    names = (tmp_path / "trace").read_text().splitlines()
    assert len(names) >= {"install": 14, "upgrade": 5, "uninstall": 11}[what], names
    # Without SEMISHARED_FULL every third point, another third for each.
    first, every = (
        (1, 1)
        if os.environ.get("SEMISHARED_FULL")
        else (1 + ("install", "upgrade", "uninstall").index(what), 3)
    )
    for number, name in list(enumerate(names, 1))[first - 1 :: every]:
        front_end = model.copy(tmp_path / str(number))
        front_end.run(*options, code=-signal.SIGKILL, SEMISHARED_KILL_AT=str(number))
        sound(front_end)
        front_end.run(*options)
        assert front_end.without_backups() == ended, name
        assert len(list(front_end.root.rglob("*.semishared-2*"))) == (0 if what == "uninstall" else 2), name
        shutil.rmtree(front_end.root)


def test_upgrade_where_directories_cannot_change_places(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system without RENAME_EXCHANGE; and here the whole package goes in."""
    assert main(["--root", str(front_end.root)]) == 0
    after = front_end.without_backups()
    older(front_end)
    monkeypatch.setattr(tree, "_exchange", lambda new, old: False)
    with monkeypatch.context() as context:
        context.setattr(signal, "signal", lambda *_: None)
        assert main(["--root", str(front_end.root)]) == 0
    assert front_end.without_backups() == after


def sound(front_end: FrontEnd) -> None:
    """Both files are whole, and no configuration names drivers that are not there."""
    read = oned_reads(front_end.conf.read_text())
    assert (
        any(key == "DS_MAD_CONF" for key, _ in read) and "VNMAD_LOCAL_ACTIONS" in front_end.execrc.read_text()
    )
    if any(value.get("NAME") == "semishared" for key, value in read if key == "TM_MAD_CONF"):  # type: ignore[union-attr]
        for part in ("lib", "tm", "datastore", "vmm"):
            assert (front_end.remotes / part / "semishared").is_dir()
    if (front_end.remotes / "tm/semishared").is_dir():
        assert (front_end.remotes / "lib/semishared/entry.py").exists()
