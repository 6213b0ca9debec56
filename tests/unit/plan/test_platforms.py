# SPDX-License-Identifier: Apache-2.0
"""Each remedy is in the words of the platform of the machine that needs it.

golden/remedies.txt has the text of every one, for every platform; REGENERATE=1 rewrites it.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from pathlib import Path
from typing import Any, Iterator, Mapping
from xml.etree import ElementTree

import pytest
from test_diagnosis import SIZES, SOUND, answer

from semishared.install import examine, preflight
from semishared.model import platforms
from semishared.model.platforms import PLATFORMS, Platform
from semishared.model.share.share import Tree
from semishared.model.share.steps import RootOnHost, SeenShareHost
from semishared.opennebula.xml import Datastore
from semishared.plan.care.diagnosis import Finding, Site
from semishared.plan.care.diagnosis_machines import of_machines
from semishared.plan.care.diagnosis_shares import Made, of_hosts, of_roots
from semishared.tools import os_release

GOLDEN = Path(__file__).parent.parent / "golden" / "remedies.txt"
LACKED = sorted(
    {word for table in (preflight.NEEDS, preflight.WANTS) for row in table.values() for word in row}
    | {"python3-libvirt", "python3-rbd"}
)
MINOR = {"8": "8.10", "9": "9.6", "10": "10.1"}
STORE = Datastore(ElementTree.fromstring("<DATASTORE><ID>110</ID><NAME>shares</NAME><TEMPLATE/></DATASTORE>"))
NAMES = [one.name for one in PLATFORMS]


def said(platform: Platform, **more: Any) -> dict[str, Any]:
    """Return what a machine of this platform says of it."""
    version = platform.version
    if platform.installer == "dnf":
        version = MINOR[version]
    return {"id": platform.ids[0], "version": version, "like": [], "installer": platform.installer, **more}


def found(os_said: Mapping[str, Any], **more: Any) -> list[Finding]:
    machine = answer(os=os_said, **more)
    return of_machines({"fe": answer(), "h1": machine}, Site("fe"), SOUND, SIZES)


def shares(os_said: Mapping[str, Any], sudo: str) -> list[Finding]:
    """Return what is said where a host of shares has no virtiofsd, and one that makes them this sudo."""
    made = Made(STORE, Tree("btrfs", "/srv", "m"), "h1", sudo=sudo)
    seen = SeenShareHost({"/srv": RootOnHost(True, "m")}, "", 1, "", [])
    machine = answer(os=os_said, libvirt={"secrets": [], "confines": ["apparmor"]})
    return [*of_roots([made], "fe"), *of_hosts([made], {"h1": seen}, {"h1": machine})]


def remedies(platform: Platform) -> Iterator[tuple[str, str]]:
    """Yield each remedy that depends on the platform, after what it mends."""
    os_said = said(platform)
    for program in LACKED:
        (one,) = found(os_said, lacks={"needed": [program], "wanted": []})
        yield one.what, one.mend
    (one,) = found(os_said, python=[3, 6, 8])
    yield one.what, one.mend
    (one,) = found(os_said, programs={"qemu-img": "5.1"})
    yield one.what, one.mend
    (one,) = found(os_said, libvirt={"error": "refused"})
    yield one.what, one.mend
    for one in shares(os_said, platform.sudo):
        yield one.what, one.mend


def page() -> str:
    lines = []
    for platform in PLATFORMS:
        lines.append(f"== {platform.name}")
        lines += [f"{what}\n    -> {mend}" for what, mend in remedies(platform)]
    return "\n".join(lines) + "\n"


@pytest.mark.fault(69, "a remedy names the packages and the daemon of the machine that needs it")
def test_every_remedy_of_every_platform() -> None:
    if os.environ.get("REGENERATE"):
        GOLDEN.write_text(page(), encoding="utf-8")
    assert page() == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("platform", PLATFORMS, ids=NAMES)
def test_no_remedy_is_of_another_family(platform: Platform) -> None:
    mine, other = (r"\bdnf\b", r"\bapt-get\b")[:: 1 if platform.installer == "dnf" else -1]
    texts = [mend for _, mend in remedies(platform)]
    assert not any(re.search(other, text) for text in texts) and any(re.search(mine, text) for text in texts)
    assert not any(word in text for text in texts for word in ("{", "}", "...", "None"))
    for text in texts:
        shlex.split(text.replace("'", ""))  # as an administrator's shell reads it
    assert sum("regular expressions" in what for what, _ in remedies(platform)) == platform.sudo.startswith(
        ("1.9.5", "1.9.9")
    )


@pytest.mark.parametrize("platform", PLATFORMS, ids=NAMES)
def test_row_says_all_and_has_a_source(platform: Platform) -> None:
    assert set(platforms.PROGRAMS) == set(platform.packages) and set(LACKED) <= set(platforms.PROGRAMS)
    assert platform.source and platform.qemu.startswith("/") and ":" in platform.user
    assert (platform.newer_python == "") == (tuple(map(int, platform.python.split("."))) >= (3, 9))
    assert platforms.of(said(platform)) is platform
    for rebuild in platform.ids:
        assert platforms.of({"id": rebuild, "version": platform.version}) is platform


@pytest.mark.parametrize(
    ("os_said", "name"),
    [
        ({}, None),
        ({"id": "plan9", "version": "4", "like": [], "installer": "", "libvirt": ""}, None),
        ({"id": "debian", "version": ""}, "Debian 13"),
        ({"id": "debian", "version": "14"}, "Debian 13"),
        ({"id": "debian", "version": "1"}, "Debian 13"),
        ({"id": "linuxmint", "version": "22", "like": ["ubuntu", "debian"]}, "Ubuntu 24.04"),
        ({"id": "eurolinux", "version": "9.4", "like": ["rhel", "fedora"]}, "EL 9"),
        ({"id": "fedora", "version": "43", "like": [], "installer": "dnf"}, "EL 10"),
        ({"id": "x", "version": "1", "like": [], "installer": "apt-get"}, "Ubuntu 24.04"),
    ],
)
def test_machine_that_is_not_in_the_table(os_said: dict[str, Any], name: str | None) -> None:
    platform = platforms.of(os_said)
    assert (platform and platform.name) == name
    if platform is None:
        assert platforms.install(os_said, ["zstd", "tar"]) == "install what brings zstd, tar"
        assert (platforms.update(os_said), platforms.daemon(os_said)) == ("update qemu", "libvirtd")


def test_machine_that_says_its_daemon_is_believed_that_and_no_other_word() -> None:
    old, new = (said(one) for one in PLATFORMS if one.name in ("EL 8", "EL 9"))
    assert (platforms.daemon(old), platforms.daemon(new)) == ("libvirtd", "virtqemud")
    assert platforms.daemon({**old, "libvirt": "virtqemud"}) == "virtqemud"
    assert platforms.daemon({**new, "libvirt": "libvirtd"}) == "libvirtd"
    assert platforms.daemon({**new, "libvirt": "libvirtd; reboot"}) == "virtqemud"


HOSTILE = "x`reboot`\n\x1b[2J{machine}"


def test_no_word_of_a_machine_comes_into_a_line() -> None:
    for name in ("id", "version", "installer", "libvirt"):
        os_said = {**said(PLATFORMS[0]), name: HOSTILE}
        for one in found(os_said, lacks={"needed": ["zstd"], "wanted": ["udp-sender"]}):
            assert "reboot" not in one.what + one.mend and "\x1b" not in one.mend


def test_python_that_is_too_old_can_read_what_it_is_sent() -> None:
    """Both texts are read whole by 3.6, and the one that it runs uses nothing that 3.6 lacks."""
    ast.parse(examine.program(), feature_version=(3, 6))
    old = (examine._of_file("tools/os_release.py") + examine.OLD.encode()).decode()
    ast.parse(old, feature_version=(3, 6))
    assert "__future__" not in old and not re.search(r"\b(list|dict|tuple)\[|removeprefix|removesuffix", old)


def test_release_is_read_from_files_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, none = tmp_path / "os-release", str(tmp_path / "none")
    monkeypatch.setattr(os_release, "FILES", (none, str(file)))
    text = b'# x\nID=\'rocky\'\nVERSION_ID="9.4"\nID_LIKE="rhel  centos fedora"\n'
    file.write_bytes(text + b"=\n\xff\xfe\nID_X\n")
    read = os_release.release()
    assert (read["id"], read["version"], read["like"]) == ("rocky", "9.4", ["rhel", "centos", "fedora"])
    monkeypatch.setattr(os_release, "FILES", (none,))
    assert os_release.release()["id"] == ""


@pytest.mark.parametrize(
    ("binaries", "socket", "daemon"),
    [
        (("libvirtd",), False, "libvirtd"),
        (("virtqemud",), False, "virtqemud"),
        (("libvirtd", "virtqemud"), True, "virtqemud"),
        (("libvirtd", "virtqemud"), False, ""),
        ((), False, ""),
    ],
)
def test_daemon_is_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, binaries: tuple[str, ...], socket: bool, daemon: str
) -> None:
    for place in ("run", "sbin"):
        (tmp_path / place).mkdir()
    for name in binaries:
        (tmp_path / "sbin" / name).touch()
    if socket:
        (tmp_path / "run" / "virtqemud-sock").touch()
    monkeypatch.setattr(os_release, "RUN", str(tmp_path / "run"))
    monkeypatch.setattr(os_release, "SBIN", str(tmp_path / "sbin"))
    assert os_release.daemon() == daemon
