# SPDX-License-Identifier: Apache-2.0
"""System datastores that two machines share: told by what machines write there. Machines here differ in their
UTS namespace.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from semishared.plan.care import diagnosis, diagnosis_machines

ROOT = Path(__file__).resolve().parents[2]
INPUT = "<OPENNEBULA><DATASTORE_LOCATION>{}</DATASTORE_LOCATION></OPENNEBULA>"


def on(machine: str, argv: list[str], data: bytes) -> str:
    """Run a program as another machine does."""
    words = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', machine, *argv]
    return subprocess.run(words, input=data, check=True, stdout=subprocess.PIPE, timeout=60).stdout.decode()


def probe(machine: str, location: Path) -> str:
    """Run what OpenNebula's monitoring runs on a host; return HEALTH."""
    said = on(
        machine,
        ["/usr/bin/python3", "-I", str(ROOT / "lib/semishared/host/probe.py")],
        INPUT.format(location).encode(),
    )
    return said.split('HEALTH = "')[1].split('"')[0]


def examine(machine: str, location: Path) -> dict[str, Any]:
    """Run what doctor runs on a machine."""
    import base64

    from semishared.install.examine import program
    from semishared.install.preflight import Question

    question = Question(roles=(), location=str(location), systems=(str(location / "101"),))
    word = base64.b64encode(json.dumps(question).encode()).decode()
    answer: dict[str, Any] = json.loads(on(machine, ["/usr/bin/python3", "-I", "-", word], program()))
    return answer


@pytest.fixture
def location(tmp_path: Path) -> Path:
    """The datastores directory of a host that had a VM."""
    found = tmp_path / "datastores"
    (found / "101").mkdir(parents=True)
    (found / "101" / ".monitor").write_text("semishared\n")
    (found / ".semishared").mkdir()
    return found


@pytest.mark.fault(2, "the host's probe says that another machine has its system datastore")
def test_the_probe_says_that_a_system_datastore_is_shared(location: Path) -> None:
    for machine in ("h1", "h2"):
        probe(machine, location)
    for machine in ("h1", "h2"):
        health = probe(machine, location)
        assert "system datastore 101 is shared with another machine" in health
        assert "the base store is shared with another machine" in health


def test_a_machine_alone_is_well_also_after_its_next_start(location: Path) -> None:
    assert [probe("h1", location) for _ in range(3)] == ["OK"] * 3
    # What its kernel draws at each start is new: it is another name.
    assert [probe("h1-after-its-start", location) for _ in range(3)] == ["OK"] * 3
    assert not list(location.rglob(".staged-*"))


def test_a_copy_of_another_machine_s_disk_is_not_that_machine(location: Path, tmp_path: Path) -> None:
    for _ in range(3):
        probe("h1", location)
    shutil.copytree(location, tmp_path / "copy")
    for _ in range(3):
        assert probe("h2", tmp_path / "copy") == "OK"
        assert probe("h1", location) == "OK"
    answers = {"h1": examine("h1", location), "h2": examine("h2", tmp_path / "copy")}
    assert diagnosis_machines.shared(answers) == {}


def test_doctor_finds_one_directory_under_any_path(location: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(location)
    (tmp_path / "own" / "101").mkdir(parents=True)
    (tmp_path / "own" / ".semishared").mkdir()
    places = {"fe": tmp_path / "elsewhere", "h1": location, "h2": tmp_path / "own"}
    for _ in range(2):
        answers = {machine: examine(machine, place) for machine, place in places.items()}
        found = diagnosis_machines.of_shared(answers, "fe")
        assert found and {item.severity for item in found} == {diagnosis.BROKEN}
        assert all("is one directory on fe, h1:" in item.what for item in found)
        assert any(f"{location}/101" in item.what for item in found)
    assert diagnosis_machines.of_shared({"h1": answers["h1"], "h2": answers["h2"]}, "fe") == []


def test_what_is_not_there_yet_is_judged_by_where_it_will_be_made(tmp_path: Path) -> None:
    answers = {machine: examine(machine, tmp_path) for machine in ("fe", "h1")}
    answers = {machine: examine(machine, tmp_path) for machine in ("fe", "h1")}
    (found,) = diagnosis_machines.of_shared(answers, "fe")
    assert f"{tmp_path} is one directory on fe, h1" in found.what and f"{tmp_path}/101" in found.what


def test_a_signature_that_is_a_link_is_not_followed(location: Path, tmp_path: Path) -> None:
    probe("h1", location)
    (signature,) = (location / "101").glob(".machine-*")
    target = tmp_path / "somebody's"
    target.write_text("precious")
    signature.unlink()
    signature.symlink_to(target)
    assert probe("h1", location) == "OK"
    assert target.read_text() == "precious" and not signature.is_symlink()
