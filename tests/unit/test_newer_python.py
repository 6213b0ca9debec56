# SPDX-License-Identifier: Apache-2.0
"""Which Python semishared goes on with where /usr/bin/python3 is too old; tests/platforms runs it."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

from semishared import newer_python
from semishared.errors import OldPython
from semishared.install import examine
from semishared.model import platforms

ROOT = Path(__file__).resolve().parents[2]
READ_BY_OLD = [
    *(ROOT / "lib/semishared" / name for name in ("__init__.py", "newer_python.py", "hostside.py")),
    *(ROOT / "lib/semishared" / name for name in ("host/probe.py", "host/watch.py", "guest/freeze_watch.py")),
    ROOT / "bin/semishared",
    *(path for part in ("tm", "datastore", "vmm") for path in sorted((ROOT / part).iterdir())),
]
"""What /usr/bin/python3 itself reads, before it goes on with another one."""
PROGRAMS = [path for path in READ_BY_OLD if path.suffix == ".py" or "python3" in path.read_text()[:30]]


def made(place: Path, *names: str) -> None:
    place.mkdir(exist_ok=True)
    for name in names:
        (place / name).write_text("")
        (place / name).chmod(0o755)


@pytest.mark.fault(73, "the newest Python beside an old one is taken, of those with libvirt's binding first")
def test_the_newest_is_taken_and_one_with_the_binding_first(tmp_path: Path) -> None:
    place, packages = tmp_path / "bin", tmp_path / "lib64"
    made(place, "python3", "python3.6", "python3.8", "python3.10-config")
    assert newer_python.newest(str(place), (str(packages),)) == ""
    made(place, "python3.9", "python3.11", "python3.12")
    (place / "python3.12").chmod(0o644)
    assert newer_python.newest(str(place), (str(packages),)) == f"{place}/python3.11"
    (packages / "python3.9/site-packages").mkdir(parents=True)
    (packages / "python3.9/site-packages/libvirt.py").write_text("")
    assert newer_python.newest(str(place), (str(packages),)) == f"{place}/python3.9"


def test_one_floor() -> None:
    assert newer_python.FLOOR == platforms.PYTHON_FLOOR
    assert f"sys.version_info < {newer_python.FLOOR}" in (ROOT / "lib/semishared/__init__.py").read_text()
    assert f"sys.version_info < {newer_python.FLOOR}" in (ROOT / "install.sh").read_text()


def test_without_one_it_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(newer_python, "newest", lambda: "")
    with pytest.raises(SystemExit) as ended:
        newer_python.go_on()
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.startswith(f"{OldPython.id} host {os.uname().nodename}: ")
    assert said.count("\n") == 1


def test_a_name_that_leads_back_does_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def execv(path: str, words: list[str]) -> None:
        raise AssertionError(f"{path} is what runs")

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(newer_python, "newest", lambda: os.path.realpath(sys.executable))
    monkeypatch.setattr(sys, "argv", [__file__])
    with pytest.raises(SystemExit):
        newer_python.go_on()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_old_python_can_read_what_it_is_given(path: Path) -> None:
    """3.6: `from __future__ import annotations` is of 3.7, and ends it before it could go on."""
    tree = ast.parse(path.read_text(), feature_version=(3, 6))
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    assert not futures


def test_an_old_python_can_read_the_examination() -> None:
    ast.parse(examine.program(), feature_version=(3, 6))
    old = examine._of_file("newer_python.py") + examine._of_file("tools/os_release.py")
    ast.parse(old + examine.OLD.encode(), feature_version=(3, 6))
