# SPDX-License-Identifier: Apache-2.0
"""What a machine says of its platform, and whether the table has this machine as it is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from semishared.errors import FalseAnswer
from semishared.install import examine, preflight
from semishared.model import platforms, shapes
from semishared.share import inspection
from semishared.tools import os_release

QUESTION = preflight.Question(("front-end", "host"))


def said_by(program: bytes) -> Any:
    """Return what a machine that has nothing of ours answers to this program."""
    argv = ["/usr/bin/python3", "-I", "-", preflight.encoded(QUESTION)]
    done = subprocess.run(argv, input=program, capture_output=True, check=True)
    assert not done.stderr
    return json.loads(done.stdout)


def test_answer_names_its_platform_and_one_that_is_no_platform_is_refused() -> None:
    sound = said_by(examine.program())
    assert shapes.wrong(sound, shapes.ANSWER) is None and sound["os"] == os_release.release()
    without = {name: one for name, one in sound.items() if name != "os"}
    assert shapes.wrong(without, shapes.ANSWER) is None
    for wrong in ("debian", {}, {**sound["os"], "like": "x"}, {**sound["os"], "id": 7}):
        assert shapes.wrong({**sound, "os": wrong}, shapes.ANSWER) is not None


@pytest.mark.fault(68, "doctor names a host's Python if it is too old for ours, and what mends it there")
def test_python_that_is_too_old_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "PYTHON_FLOOR", (99, 0))
    program = examine.program()
    newer = said_by(program)
    assert shapes.wrong(newer, shapes.ANSWER) is None and newer["programs"], "one beside it has answered"
    said = said_by(program.replace(b'PLACE = "/usr/bin"', b'PLACE = "/nowhere"'))
    assert shapes.wrong(said, shapes.ANSWER) is None and said["os"] == os_release.release()
    assert said["programs"] == {} and said["user"] == preflight.user()
    el_8 = {"id": "almalinux", "version": "8.10", "like": ["rhel"], "installer": "dnf", "libvirt": ""}
    assert examine.lacking("h1", {**said, "python": [3, 6, 8], "os": el_8}).line() == (
        "h1: /usr/bin/python3 3.9 or newer missing; as root there: dnf install python39"
    )


def test_machine_that_does_not_cease_to_answer_is_not_heard_to_its_end() -> None:
    with pytest.raises(FalseAnswer, match="localhost says more of itself than 4 MiB"):
        examine.examine("localhost", "x", user=("sh", "-c", "head -c 5000000 /dev/zero"))


def _here() -> platforms.Platform:
    said = os_release.release()
    found = platforms.of(said)
    if found is None or said["version"] != found.version or not shutil.which("dpkg-query"):
        pytest.skip("this machine's release is not in the table")
    return found


def _installed(package: str) -> str:
    argv = ["dpkg-query", "-W", "-f", "${Status} ${Version}", package]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout.rpartition(" ")[2] if done.stdout.startswith("install ok installed") else ""


def test_row_of_this_machine_is_as_this_machine_is() -> None:
    """Programs come from the packages that remedies name; versions are those that are installed."""
    here = _here()
    for program, packages in here.packages.items():
        paths = [path for path in map(shutil.which, program.split("|")) if path]
        names = [name for name in packages.split() if _installed(name)]
        if paths and names:
            files = subprocess.run(["dpkg-query", "-L", *names], capture_output=True, text=True, check=True)
            last = {path.rpartition("/")[2] for path in files.stdout.splitlines()}
            assert any(path.rpartition("/")[2] in last for path in paths), program
    versions = {
        "qemu-utils": here.qemu_version,
        "libvirt-daemon": here.libvirt_version,
        "python3": here.python,
        "sudo": here.sudo,
    }
    for package, wanted in versions.items():
        version = re.sub(r"^\d+:", "", _installed(package))
        assert not version or re.match(rf"{re.escape(wanted)}\b|{re.escape(wanted)}p", version), package


def test_paths_of_this_machine_are_as_the_table_has_them() -> None:
    here = _here()
    if _installed("qemu-system-x86"):
        assert shutil.which(here.qemu)
    if _installed("qemu-system-common"):
        assert inspection.daemon() == here.virtiofsd
    if _installed("libvirt-daemon"):
        assert os_release.daemon() in ("", here.daemon)
        with open("/etc/libvirt/qemu.conf", encoding="utf-8") as file:
            text = file.read()
        user, _, group = here.user.partition(":")
        assert f'#user = "{user}"' in text and f'#group = "{group}"' in text
