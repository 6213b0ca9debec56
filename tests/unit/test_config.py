# SPDX-License-Identifier: Apache-2.0
"""etc/semishared.conf: defaults, overlays, and what is refused by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.config import Config, load
from semishared.errors import BadAttribute
from semishared.model.disk.place import IO_CLASSES

SHIPPED = Path(__file__).resolve().parents[2] / "etc" / "semishared.conf"


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "semishared.conf"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return str(path)


def test_missing_file_means_defaults(tmp_path: Path) -> None:
    assert load(str(tmp_path / "none")) == Config()


def test_shipped_file_holds_every_key_with_its_default() -> None:
    assert load(str(SHIPPED)) == Config()
    keys, section = set(), ""
    for line in SHIPPED.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            keys.add(f"{section}_{line.split(' =')[0]}")
    assert keys == set(Config._fields)


def test_values_replace_defaults(tmp_path: Path) -> None:
    found = load(
        written(tmp_path, "[hosts]\nconnect_timeout_s = 3\nscripts_dir = /opt/one-1\n[overlays]\noptions =\n")
    )
    assert found == Config(hosts_connect_timeout_s=3, hosts_scripts_dir="/opt/one-1", overlays_options="")
    assert load(written(tmp_path, "[uploads]\nleast_rate = 2M\n")).uploads_least_rate == 2 << 20
    assert load(written(tmp_path, "[uploads]\nleast_rate = none\n")).uploads_least_rate == 0
    for text, rate in (
        ("none", 0),
        ("300K", 300 << 10),
        ("1.5m", 3 << 19),
        ("1250000000", 1250000000),
        ("0", 0),
    ):
        assert load(written(tmp_path, f"[staging]\nrate = {text}\n")).staging_rate == rate
    scratch = load(
        written(tmp_path, "[io_class]\nscratch_bytes = 7M\nscratch_iops = none\nnormal_iops = 900\n")
    )
    assert scratch.io_limits == {"production": (0, 0), "normal": (0, 900), "scratch": (7 << 20, 0)}
    for bulk in ("none", "10.20.0.0/16", "10.20.0.1/16", "fd00:1::/64", "10.20.0.7"):
        assert load(written(tmp_path, f"[network]\nbulk = {bulk}\n")).network_bulk == bulk
    text = (
        "[migration]\nrate = 40m\ndowntime_ms = 50\nauto_converge = yes\ntimeout_s = 60\nat_timeout = "
        "post-copy\n"
    )
    expected = {
        "rate": 40 << 20,
        "downtime_ms": 50,
        "auto_converge": "yes",
        "timeout_s": 60,
        "at_timeout": "post-copy",
    }
    assert load(written(tmp_path, text)).migration == expected


def test_what_is_checked_later_is_what_is_checked_when_it_is_read(tmp_path: Path) -> None:
    for size, floor in (("200 GiB", "1.5G"), ("30%", "0"), ("none", "none"), ("0", "100%")):
        assert (
            load(written(tmp_path, f"[bases]\nsize_limit = {size}\nfree_floor = {floor}\n")).bases_size_limit
            == size
        )
    for text, rate in (("0.5M", 1 << 19), ("40m", 40 << 20), ("1000000", 1000000), ("none", 0)):
        assert load(written(tmp_path, f"[staging]\nrate = {text}\n")).staging_rate == rate
    assert load(written(tmp_path, "[hosts]\nsilence_timeout_s = 10\n")).hosts_silence_timeout_s == 10


def test_a_file_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    """Of root, mode 0600, or on a disk with errors: what it says is not known. Here it is a directory, which
    root cannot read either.
    """
    with pytest.raises(BadAttribute, match="cannot be read: Is a directory"):
        load(str(tmp_path))
    written(tmp_path, "")
    assert load(str(tmp_path / "semishared.conf" / "semishared.conf")) == Config()


def test_every_class_of_disks_has_its_limits() -> None:
    assert tuple(Config().io_limits) == IO_CLASSES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[io_class]\nscratch_bytes = 100\n", "scratch_bytes in [io_class] is not from 1M to 900000G"),
        ("[io_class]\nnormal_bytes = 999999999G\n", "normal_bytes in [io_class] is not from 1M to 900000G"),
        ("[io_class]\nscratch_bytes = fast\n", "scratch_bytes = 'fast' is neither bytes per second"),
        ("[io_class]\nscratch_iops = 2K\n", "scratch_iops = '2K' is not a positive number or none"),
        ("[io_class]\nidle_iops = 2\n", "unknown key 'idle_iops' in [io_class]"),
        ("[network]\nbulk = eth1\n", "bulk = 'eth1' is neither a network as 10.20.0.0/16, an address, nor"),
        ("[network]\nbulk = 10.20.0.0/33\n", "bulk = '10.20.0.0/33' is neither a network"),
        ("[network]\nbulk =\n", "bulk = '' is neither a network"),
        ("[network]\nbulk = 10.20.0.0/16, 10.21.0.0/16\n", "is neither a network"),
        ("[hosts]\nconect_timeout_s = 3\n", "unknown key 'conect_timeout_s' in [hosts]"),
        ("[host]\nconnect_timeout_s = 3\n", "unknown key 'connect_timeout_s' in [host]"),
        ("[hosts]\nconnect_timeout_s = soon\n", "connect_timeout_s = 'soon'"),
        ("[hosts]\nconnect_timeout_s = 0\n", "not a positive number"),
        ("[hosts]\nconnect_timeout_s = -1\n", "not a positive number"),
        ("[hosts]\nconnect_timeout_s = 1.5\n", "not a positive number"),
        ("[hosts]\nconnect_timeout_s = \u00b2\n", "not a positive number"),
        ("[hosts]\nconnect_timeout_s = \u0663\n", "not a positive number"),
        ("[hosts]\nconnect_timeout_s =\n", "not a positive number"),
        ("[hosts]\nscripts_dir = /x; reboot\n", "not a plain path"),
        (
            "[snapshots]\nfreeze = maybe\n",
            "freeze = 'maybe' is not one of agent-or-suspend, agent, suspend, none",
        ),
        ("[hosts]\nscripts_dir = remotes\n", "not a plain path"),
        ("[hosts]\nscripts_dir =\n", "not a plain path"),
        ("[overlays]\noptions = extended_l2\n", "nor key=value"),
        ("[overlays]\noptions = backing_file=/etc/passwd\n", "nor key=value"),
        ("[overlays]\noptions = by-size,cluster_size=1M\n", "nor key=value"),
        ("[overlays]\noptions = a=b, c=d\n", "nor key=value"),
        ("[uploads]\nleast_rate = 32 KB\n", "least_rate = '32 KB'"),
        ("[uploads]\nleast_rate = -1\n", "neither bytes per second"),
        ("[staging]\nrate = 1.2.3\n", "rate = '1.2.3' is neither bytes per second"),
        ("[staging]\nrate = 0.5\n", "rate = '0.5' is neither bytes per second"),
        ("[staging]\nrate = .\n", "rate = '.' is neither bytes per second"),
        ("[staging]\nrate = fast\n", "rate = 'fast' is neither bytes per second"),
        ("[uploads]\nstat_limit_s = none\n", "not a positive number"),
        ("[hosts]\nconnect_timeout_s = 9999999999\n", "not a positive number"),
        ("[migration]\nrate = 1023K\n", "libvirt counts in MiB per second"),
        ("[migration]\nrate = fast\n", "rate = 'fast' is neither bytes per second"),
        ("[migration]\nrate =\n", "rate = '' is neither bytes per second"),
        ("[migration]\nrate = 40M; reboot\n", "neither bytes per second"),
        ("[migration]\ndowntime_ms = none\n", "downtime_ms = 'none' is not a positive number"),
        ("[migration]\ndowntime_ms = 0\n", "not a positive number"),
        ("[migration]\nauto_converge = true\n", "auto_converge = 'true' is not one of yes, no"),
        ("[migration]\ntimeout_s = 0\n", "timeout_s = '0' is not a positive number or none"),
        ("[migration]\ntimeout_s = -1\n", "not a positive number or none"),
        ("[migration]\nat_timeout = pause\n", "at_timeout = 'pause' is not one of abort, suspend, post-copy"),
        ("[migration]\nat_timeout = suspend\n", "at_timeout = suspend has no timeout_s"),
        ("[hosts]\nsilence_timeout_s = 9\n", "silence_timeout_s = 9 is less than 10"),
        ("[bases]\nsize_limit = lots\n", "semishared.conf: size_limit = 'lots' is neither a size"),
        ("[bases]\nfree_floor = 200%\n", "semishared.conf: free_floor = '200%' is neither a size"),
        ("[bases]\nfree_floor =\n", "free_floor = '' is neither a size"),
        ("[staging]\nrate = 1.2.3\n", "rate = '1.2.3' is neither bytes per second (32K) nor none"),
        ("[staging]\nrate = 99999999999999999999\n", "is neither bytes per second (32K) nor none"),
        ("connect_timeout_s = 3\n", "semishared.conf"),
        ("[hosts\n", "semishared.conf"),
        ("[hosts]\n[hosts]\n", "semishared.conf"),
        ("[hosts]\nscripts_dir = /\udcff\n", "semishared.conf"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadAttribute) as caught:
        load(written(tmp_path, text))
    assert words in caught.value.detail


@pytest.mark.fault(80, "what semishared.conf says wrong has the remedy of that file, not an image's")
def test_a_mistake_has_the_remedy_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(BadAttribute) as caught:
        load(written(tmp_path, "[hosts]\nscript_dir = /x\n"))
    line = caught.value.line()
    assert line.startswith(
        "SS097 semishared.conf: unknown key 'script_dir' in [hosts]: scripts_dir is one; correct that line "
        "of etc/semishared.conf "
    )
    assert "image" not in line


@given(
    key=st.sampled_from(
        [
            "hosts:connect_timeout_s",
            "hosts:scripts_dir",
            "overlays:options",
            "bases:size_limit",
            "staging:rate",
            "x:y",
        ]
    ),
    value=st.text(max_size=20),
)
def test_any_text_is_a_config_or_a_bad_attribute(tmp_path: Path, key: str, value: str) -> None:
    section, _, name = key.partition(":")
    try:
        load(written(tmp_path, f"[{section}]\n{name} = {value}\n".encode("utf-8", "replace").decode()))
    except BadAttribute:
        pass
