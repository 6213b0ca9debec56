# SPDX-License-Identifier: Apache-2.0
"""Capabilities of Ceph keys; tests/ceph/test_lab.py holds them against a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from semishared.cli.main import main
from semishared.errors import BadAttribute
from semishared.plan.store.ceph_caps import keys


def test_each_role_has_its_key() -> None:
    made = keys("libvirt", "one", reader="bases", bridge="bridge")
    assert [(key.roles, key.user) for key in made] == [
        (("bridge",), "bridge"),
        (("hosts",), "libvirt"),
        (("bases",), "bases"),
    ]
    bridge, hosts, bases = (dict(key.caps) for key in made)
    assert bridge == {"mon": "profile rbd", "mgr": "profile rbd pool=one", "osd": "profile rbd pool=one"}
    assert hosts["mon"] == "profile rbd"
    assert "rbd_id" not in hosts["osd"] and "rbd_directory" not in hosts["osd"]
    assert bases == {"mon": "profile rbd-read-only", "osd": "profile rbd-read-only pool=one"}


def test_a_user_of_several_roles_can_what_all_need() -> None:
    (key,) = keys("one", "one")
    assert key.roles == ("bridge", "hosts", "bases")
    assert dict(key.caps)["osd"] == "profile rbd pool=one"
    assert keys("one", "one", bridge="b")[1].caps == keys("one", "one", reader="r", bridge="b")[1].caps


def test_who_reads_for_guests_writes_no_data() -> None:
    remote = keys("libvirt", "one", "bases", "bridge", remote="boots")[3]
    assert (remote.roles, remote.user) == (("remote",), "boots")
    assert (
        dict(remote.caps)["osd"]
        == "profile rbd-read-only pool=one, allow rwx pool=one object_prefix rbd_header."
    )
    assert keys("libvirt", "one", "bases", "bridge", remote="libvirt") == [
        key._replace(roles=("hosts", "remote")) if key.user == "libvirt" else key
        for key in keys("libvirt", "one", "bases", "bridge")
    ]


def test_a_data_pool_is_in_every_capability_of_the_osds() -> None:
    for key in keys("libvirt", "one", "bases", "bridge", data_pool="one-ec"):
        assert "pool=one-ec" in dict(key.caps)["osd"]


def test_the_command_names_every_capability() -> None:
    line = keys("libvirt", "one", reader="bases", bridge="bridge")[0].command()
    assert line == (
        "ceph auth get-or-create client.bridge mon 'profile rbd' mgr 'profile rbd pool=one' osd "
        "'profile rbd pool=one'"
    )


@pytest.mark.reads_checkout
def test_the_how_to_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/ceph.md").read_text()
    words = next(line for line in page.splitlines() if "$ semishared caps" in line).split()[2:]
    assert main(words) == 0
    for line in capsys.readouterr().out.splitlines():
        assert f"    {line}\n" in page


@pytest.mark.parametrize(
    "words", [["caps"], ["caps", "--user", "admin"], ["caps", "--user", "a", "--pool", "b c"]]
)
def test_without_good_names_nothing_is_printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("user", ["", "admin", "a b", "a'b", "client.a,b", "-x", "a\n"])
def test_a_bad_user_is_refused(user: str) -> None:
    with pytest.raises(BadAttribute):
        keys(user, "one")


@pytest.mark.parametrize("pool", ["", "a b", "a'", "one,two"])
def test_a_bad_pool_is_refused(pool: str) -> None:
    with pytest.raises(BadAttribute):
        keys("libvirt", pool)
