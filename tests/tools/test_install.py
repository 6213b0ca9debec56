# SPDX-License-Identifier: Apache-2.0
"""install.sh against a remotes tree that holds the stand-ins for OpenNebula's own scripts."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest

import small_checkout
from lab.oned.objects import History
from semishared import VERSION
from semishared.errors import CannotInstall
from semishared.install import in_use, next_steps, preflight
from semishared.install import main as installer
from semishared.install.front_end import FrontEnd
from semishared.opennebula.oned import Oned
from semishared.wire.messages import release
from tools.oned_site import HERE, SYSTEM, ActionSite

ROOT = Path(__file__).resolve().parents[2]
STOCK = ROOT / "tests" / "lab" / "stock"
WHOLE = ROOT / "install.sh"


def install(remotes: Path, *options: str, script: Optional[Path] = None, code: int = 0, **env: str) -> str:
    """Run that of a small checkout, where it is not said which."""
    done = subprocess.run(
        [str(script or small_checkout.script()), "--remotes", str(remotes), *options],
        cwd="/",
        env={"PATH": os.environ["PATH"], **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr.startswith("install.sh: ") and done.stderr.count("\n") == 1
        return done.stderr
    assert not done.stderr
    return done.stdout


def snapshot(tree: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return everything there is below `tree`, with its mode, time and content."""
    found = {}
    for path in sorted(tree.rglob("*")):
        status = path.lstat()
        content = (
            os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        )
        found[str(path.relative_to(tree))] = (
            status.st_mode,
            0 if path.is_dir() else status.st_mtime_ns,
            content,
        )
    return found


@pytest.fixture
def remotes(tmp_path: Path) -> Path:
    tree = tmp_path / "remotes with a space"
    shutil.copytree(STOCK, tree)
    for name in ("tm/shared/clone", "datastore/fs/cp", "vmm/lxc/deploy"):
        (tree / name).parent.mkdir(parents=True)
        (tree / name).write_text("#!/bin/sh\n")
    return tree


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a small checkout of one's own, to be changed."""
    small_checkout.lay_out(tmp_path / "checkout")
    return tmp_path / "checkout"


def test_installs_everything_with_modes_and_byte_code(remotes: Path) -> None:
    install(remotes, script=WHOLE)
    for part in ("tm", "datastore", "vmm"):
        for source in (ROOT / part).iterdir():
            target = remotes / part / "semishared" / source.name
            assert target.read_bytes() == source.read_bytes() and target.stat().st_mode & 0o777 == 0o755
    package = remotes / "lib" / "semishared"
    modules = [path for path in (ROOT / "lib" / "semishared").rglob("*.py")]
    assert modules
    for source in modules:
        target = package / source.relative_to(ROOT / "lib" / "semishared")
        assert target.read_bytes() == source.read_bytes() and target.stat().st_mode & 0o777 == 0o644
        assert list((target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"))
    assert (remotes / "etc" / "semishared.conf").read_bytes() == (
        ROOT / "etc" / "semishared.conf"
    ).read_bytes()
    assert not list(remotes.glob(".semishared-install.*"))


def test_package_is_known_from_any_other_by_its_build(remotes: Path, checkout: Path) -> None:
    """Front-end and hosts compare it: two packages of one VERSION need not understand each other."""

    def installed() -> str:
        program = (
            "import sys; sys.path.insert(0, sys.argv[1]); from semishared.wire.messages import "
            "RELEASE; print(RELEASE)"
        )
        argv = ["/usr/bin/python3", "-I", "-B", "-c", program, str(remotes / "lib")]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    install(remotes)
    first = installed()
    assert re.fullmatch(rf"{re.escape(VERSION)}\+[0-9a-f]{{12}}", first)
    install(remotes, script=checkout / "install.sh")
    assert installed() == first, "the same files, from elsewhere"
    (checkout / "lib/semishared/units.py").write_text(
        (ROOT / "lib/semishared/units.py").read_text() + "# one line more\n"
    )
    install(remotes, script=checkout / "install.sh")
    assert installed() not in (first, VERSION)
    assert release(str(ROOT / "lib/semishared")) == VERSION, "a checkout has no build"


def test_byte_code_is_valid_after_the_copy_to_a_host(remotes: Path, tmp_path: Path) -> None:
    install(remotes)
    host = sync(remotes, tmp_path)
    shutil.rmtree(remotes)
    program = f"import sys; sys.path.insert(0, {str(host / 'lib')!r}); import semishared.errors"
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-v", "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"matches {host / 'lib/semishared/errors.py'}" in done.stderr


def test_second_run_changes_nothing(remotes: Path) -> None:
    install(remotes, script=WHOLE)
    before = snapshot(remotes)
    assert "nothing to do" in install(remotes, script=WHOLE)
    assert snapshot(remotes) == before


def test_dry_run_changes_nothing_and_tells(remotes: Path) -> None:
    before = snapshot(remotes)
    assert f"would make {remotes}/vmm/semishared" in install(remotes, "--dry-run")
    assert snapshot(remotes) == before
    install(remotes)
    (remotes / "vmm/semishared/deploy").write_text("old")
    before = snapshot(remotes)
    told = install(remotes, "--dry-run")
    assert (
        f"would replace {remotes}/vmm/semishared" in told
        and "tm/semishared" not in told
        and "deploy differ" in told
    )
    assert snapshot(remotes) == before
    assert "would remove" in install(remotes, "--dry-run", "--uninstall")
    assert snapshot(remotes) == before


def test_files_of_an_older_version_go(remotes: Path) -> None:
    install(remotes)
    old = [
        remotes / name
        for name in (
            "lib/semishared/plan/old.py",
            "tm/semishared/old",
            "vmm/semishared/old",
            "vmm/semishared/x/y",
        )
    ]
    for path in old:
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    install(remotes)
    assert not [path for path in old if path.exists()]


def test_changed_file_or_mode_is_put_right(remotes: Path) -> None:
    install(remotes)
    before = {
        name: (mode, content)
        for name, (mode, _, content) in snapshot(remotes).items()
        if "__pycache__" not in name
    }
    (remotes / "vmm/semishared/deploy").chmod(0o644)
    (remotes / "lib/semishared/errors.py").write_text("")
    assert "replace" in install(remotes)
    after = {
        name: (mode, content)
        for name, (mode, _, content) in snapshot(remotes).items()
        if "__pycache__" not in name
    }
    assert after == before


def test_nothing_of_others_is_touched(remotes: Path) -> None:
    before = snapshot(remotes)
    install(remotes)
    after = snapshot(remotes)
    assert {name: after[name] for name in before} == before
    install(remotes, "--uninstall")
    assert snapshot(remotes) == before


def test_uninstall_keeps_a_changed_configuration(remotes: Path) -> None:
    install(remotes)
    conf = remotes / "etc" / "semishared.conf"
    conf.write_text("[hosts]\n")
    assert "kept" in install(remotes)
    assert "kept" in install(remotes, "--uninstall")
    assert conf.read_text() == "[hosts]\n"
    assert not list(remotes.glob("*/semishared"))
    assert "kept" in install(remotes, "--uninstall")


def sync(remotes: Path, tmp_path: Path) -> Path:
    """Copy as `onehost sync` does."""
    host = tmp_path / "var tmp one"
    host.mkdir()
    subprocess.run(["rsync", "-LRaz", "--delete", ".", str(host)], cwd=remotes, check=True)
    return host


def test_failing_half_way_leaves_the_old_version(remotes: Path, checkout: Path) -> None:
    script = checkout / "install.sh"
    install(remotes, script=script)
    before = snapshot(remotes)
    (checkout / "lib/semishared/hostside.py").write_text("not python at all (")
    done = subprocess.run([str(script), "--remotes", str(remotes)], capture_output=True, text=True)
    assert done.returncode == 1 and "cannot compile" in done.stderr
    assert snapshot(remotes) == before


def test_nothing_is_put_into_a_directory_that_took_the_place_of_ours(
    remotes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkdtemp

    def exchanged(*words: Any, **named: Any) -> str:
        path = make(*words, **named)
        os.chown(path, 65534, 65534)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", exchanged)
    place = FrontEnd(str(remotes), None, False)
    with pytest.raises(CannotInstall, match="was exchanged"), installer.staged(place, str(ROOT), [], False):
        pass


@pytest.mark.fault(7, "install.sh puts nothing where a link below remotes/ leads out of it")
@pytest.mark.parametrize("name", ["lib", "datastore", "tm", "etc"])
def test_link_out_of_remotes_is_not_followed(remotes: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    if (remotes / name).exists():
        (remotes / name).rename(remotes / f"{name}.was")
    (remotes / name).symlink_to(outside)
    said = install(remotes, code=1)
    assert "leads out of" in said
    assert not list(outside.iterdir())


def test_what_apply_runs_finds_its_opennebula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One below ONE_LOCATION has its session, its address and its gems elsewhere; nothing else of ours goes
    along.
    """
    wanted = {
        "ONE_LOCATION": "/opt/one",
        "ONE_XMLRPC": "http://fe/RPC2",
        "ONE_AUTH": "/opt/one/auth",
        "GEM_HOME": "/g",
        "GEM_PATH": "/g",
    }
    for name, value in {**wanted, "SECRET": "x"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "onehost").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "onehost").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    next_steps.carry_out(
        [next_steps.Command(pwd.getpwuid(os.geteuid()).pw_name, ("onehost", "sync", "--force"))]
    )
    told = dict(line.strip().split("=", 1) for line in capsys.readouterr().out.splitlines()[1:])
    assert {name: told.get(name) for name in wanted} == wanted and "SECRET" not in told


def test_the_end_of_what_somebody_types_is_a_no(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-D at `Go on?`: the terminal is there, and nothing more comes from it."""
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", end_of_file)
    timed: Any = SimpleNamespace(texts={}, gone=[], root="")
    place: Any = SimpleNamespace(remotes="/remotes")
    assert not installer.agreed(place, [], timed, False)
    assert capsys.readouterr().out.endswith("\n")


def end_of_file(prompt: str) -> str:
    raise EOFError


def test_where_nobody_is_whose_opennebula_it_is_no_host_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """--hosts, into the image of a front-end, on a machine without that user."""
    monkeypatch.setattr(next_steps, "administrator", lambda place: "no-such-user")
    place: Any = SimpleNamespace(remotes="/remotes")
    with pytest.raises(CannotInstall, match="there is no user no-such-user here"):
        installer.check_machines("h1", place)


def test_programs_are_started_only_for_their_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """install.sh asks whether they are there, doctor also for what QEMU it is."""
    (tmp_path / "qemu-img").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\necho qemu-img version 9.8.7\n")
    (tmp_path / "qemu-img").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    question = preflight.Question(("front-end",))
    assert preflight.examine(question)["programs"]["qemu-img"] == "" and not (tmp_path / "started").exists()
    assert preflight.examine(question._replace(versions=True))["programs"]["qemu-img"] == "9.8.7"


@pytest.mark.fault(42, "while VMs have disks of ours the drivers stay, and so does their version")
def test_neither_drivers_nor_their_version_are_taken_from_vms(remotes: Path, tmp_path: Path) -> None:
    with ActionSite.up(tmp_path / "one") as site:
        assert site.oned.rpc
        env: Any = {"ONE_XMLRPC": site.oned.rpc.url, "ONE_AUTH": str(site.auth)}
        vm = site.vm()
        install(remotes, **env)
        before = snapshot(remotes)
        installed = remotes / "lib/semishared/__init__.py"
        same = installed.read_text()
        site.oned.vm(vm).history.append(History(0, 0, site.oned.host(HERE), "semishared", SYSTEM))
        refused = install(remotes, "--uninstall", code=1, **env)
        assert (
            f"1 VMs have disks of semishared ({vm}): without the drivers they can be neither started"
            in refused
            and "--force" in refused
        )
        # What the datastore is called by now says nothing: the VM has its driver from when it was deployed.
        site.oned.datastores[SYSTEM].tm_mad = "ssh"
        assert f"1 VMs have disks of semishared ({vm})" in install(remotes, "--uninstall", code=1, **env)
        assert snapshot(remotes) == before
        install(remotes, **env)
        installed.write_text(same.replace(VERSION, "9.0.0"))
        refused = install(remotes, code=1, **env)
        assert (
            f"with the drivers of {VERSION}, which need not understand what those of 9.0.0 wrote" in refused
        )
        site.oned.rpc.close()
        assert "which VMs have disks of semishared is not known" in install(
            remotes, "--no-config", "--uninstall", code=1, **env
        )
        words = [
            str(small_checkout.script()),
            "--remotes",
            str(remotes),
            "--uninstall",
            "--no-config",
            "--force",
        ]
        done = subprocess.run(
            words, env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True, check=True
        )
        assert "warning: which VMs" in done.stderr and not installed.exists()


@pytest.mark.fault(42, "who does not see all VMs takes no drivers away: of others' nobody would know")
def test_a_user_who_does_not_see_all_vms_takes_no_drivers_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, said = (
        SimpleNamespace(remotes=str(tmp_path)),
        {"one.vmpool.info": "<VM_POOL/>", "one.datastorepool.info": "<DATASTORE_POOL/>"},
    )
    (tmp_path / "lib/semishared").mkdir(parents=True)
    (tmp_path / "lib/semishared/__init__.py").write_text('VERSION = "0.2.0"\n')

    class Asked(Oned):
        def __init__(self) -> None:
            self.group = 0

        def _call(self, method: str, *words: object) -> bytes:
            return said.get(
                method, f"<USER><ID>4</ID><NAME>ann</NAME><GID>{self.group}</GID></USER>"
            ).encode()

    asked = Asked()
    monkeypatch.setattr(in_use, "_oned", lambda _: asked)
    assert in_use.why_not(place, uninstall=True) == ""  # type: ignore[arg-type]
    asked.group = 1
    found = in_use.why_not(place, uninstall=True)  # type: ignore[arg-type]
    assert "which VMs have disks of semishared is not known (user ann is not of group oneadmin" in found


@pytest.mark.parametrize(
    ("one", "other", "older"),
    [
        ("0.2.0.dev0", "0.2.0", True),
        ("0.2.0", "0.2.0.dev3", False),
        ("0.2.0", "0.10.0", True),
        ("0.2.0", "0.2.0", False),
        ("0.2.0", "", False),
        ("0.2.0", "of somebody else's", False),
    ],
)
def test_which_version_is_older(one: str, other: str, older: bool) -> None:
    assert in_use._is_older(one, other) == older
