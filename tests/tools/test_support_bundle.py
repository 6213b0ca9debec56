# SPDX-License-Identifier: Apache-2.0
"""`semishared support-bundle` with a simulated oned: what is in the file, and that no planted secret is."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any, Dict, Iterator

import pytest

from configurations import oned_conf, vmm_execrc
from semishared import VERSION
from semishared.cli import main, support_bundle
from semishared.cli.doctor import located
from semishared.errors import ToolFailed
from semishared.install.front_end import FrontEnd
from semishared.tools.redact import Redactor
from tools.oned_site import ActionSite
from tools.test_gc_clouds import use

PASSWORD, CEPH = "pl4nted-p4ssword", "AQBhN2ZlAAAAABAAq4VoM0yO5c3S9hV7mFZ2Kw=="
SECRETS = (PASSWORD, CEPH, "db-s3cret", "url-s3cret", "mount-s3cret")
LOG = f"""[TM] semishared: clone https://u:url-s3cret@host/x.qcow2 failed
[DB] of another subsystem
[DS] SS012 image 7: rbd --key {CEPH} -p one: denied for oneadmin:{PASSWORD}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActionSite]:
    with ActionSite.up(tmp_path / "one") as up:
        use(up, monkeypatch)
        up.auth.write_text("oneadmin:password\n")
        monkeypatch.setattr(os, "geteuid", lambda: 9869)
        yield up


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FrontEnd:
    """An OpenNebula below a directory, with secrets in every file; what verbs of ours say is planted too."""
    root = tmp_path / "root"
    remotes, etc, logs = root / "var/lib/one/remotes", root / "etc/one", root / "var/log/one"
    for folder in (remotes / "etc", remotes / "vmm/kvm", etc / "vmm_exec", logs):
        folder.mkdir(parents=True)
    (remotes / "vmm/kvm/deploy").touch()
    (remotes / "VERSION").write_text("7.4.0\n")
    (remotes / "etc/semishared.conf").write_text(f"[fence]\ncommand = /bin/fence --password {PASSWORD}\n")
    database = 'DB = [ BACKEND = "mysql", PASSWD = "db-s3cret" ]\n'
    (etc / "oned.conf").write_text(database + oned_conf())
    (etc / "vmm_exec/vmm_execrc").write_text(vmm_execrc())
    (logs / "oned.log").write_text(LOG)
    (logs / "7.log").write_text("".join(f"line {n} of semishared\n" for n in range(1000)) + LOG)
    auth = tmp_path / "one_auth"
    auth.write_text(f"oneadmin:{PASSWORD}\n")
    keyring = tmp_path / "ceph.client.x.keyring"
    keyring.write_text(f"[client.x]\n\tkey = {CEPH}\n")
    monkeypatch.setenv("ONE_AUTH", str(auth))
    monkeypatch.setattr(support_bundle, "SECRETS", (str(keyring),))
    monkeypatch.setattr(support_bundle, "hosts", lambda: [{"name": "h1", "said": f"x {CEPH}"}])
    said = {
        "findings": [{"what": f"cannot mount with secret=mount-s3cret for {PASSWORD}"}],
        "token": PASSWORD,
    }
    monkeypatch.setattr(support_bundle, "own", lambda *words: {**said, "words": list(words)})
    return located(str(root))


def parts(path: Path) -> Dict[str, str]:
    with tarfile.open(path) as archive:
        found = {}
        for member in archive:
            file = archive.extractfile(member)
            assert file and member.name.startswith("semishared-support-")
            found[member.name.partition("/")[2]] = file.read().decode()
    return found


def collected(place: FrontEnd, root: Path, path: Path) -> Dict[str, str]:
    bundle = support_bundle.Bundle(Redactor(support_bundle.known_secrets()))
    support_bundle.collect(bundle, place, str(root))
    with support_bundle.made(str(path)) as file:
        bundle.write(file, "semishared-support-x")
    return parts(path)


@pytest.mark.fault(79, "no planted secret is in a support bundle")
def test_no_planted_secret_is_in_it(place: FrontEnd, tmp_path: Path) -> None:
    found = collected(place, tmp_path / "root", tmp_path / "b.tar.xz")
    assert "errors.txt" not in found, found.get("errors.txt")
    for name, text in found.items():
        for secret in SECRETS:
            assert secret not in text, (name, secret)
    assert VERSION in found["versions.json"] and json.loads(found["versions.json"])["opennebula"] == "7.4.0"
    assert "TM_MAD" in found["oned.conf"] and "MYSQL" not in found["oned.conf"].upper()
    assert "LIVE_DISK_SNAPSHOTS" in found["vmm_execrc"] and "[fence]" in found["semishared.conf"]
    assert json.loads(found["doctor.json"])["words"] == ["doctor", "--json", "--root", str(tmp_path / "root")]
    assert "SS012 image 7" in found["log/oned.log"] and "subsystem" not in found["log/oned.log"]
    assert len(found["log/7.log"].splitlines()) == 200
    assert (tmp_path / "b.tar.xz").stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_had_is_said_and_the_rest_is_there(
    place: FrontEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_words: str) -> Any:
        raise ToolFailed(f"no answer for oneadmin:{PASSWORD}")

    monkeypatch.setattr(support_bundle, "own", fails)
    (tmp_path / "root/etc/one/oned.conf").write_text("TM_MAD = [\n")
    found = collected(place, tmp_path / "root", tmp_path / "b.tar.xz")
    assert {line.partition(":")[0] for line in found["errors.txt"].splitlines()} == {
        "doctor.json",
        "oned.conf",
        "status.json",
    }
    assert PASSWORD not in found["errors.txt"] and "log/oned.log" in found


def test_command_makes_one_file_and_replaces_none(
    site: ActionSite, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, path = tmp_path / "root", tmp_path / "b.tar.xz"
    (root / "var/lib/one/remotes/vmm/kvm").mkdir(parents=True)
    (root / "var/lib/one/remotes/vmm/kvm/deploy").touch()
    (root / "etc/one").mkdir(parents=True)
    (root / "etc/one/oned.conf").write_text(oned_conf())
    words = ["support-bundle", "--json", "--root", str(root), "--output", str(path)]
    monkeypatch.setattr(support_bundle, "own", lambda *words: list(words))
    assert main.main(words) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["file"] == str(path) and {"hosts.json", "versions.json"} <= set(said["parts"])
    assert set(said["errors"]) == {"semishared.conf", "vmm_execrc"}
    assert "password" not in parts(path)["hosts.json"]
    content = path.read_bytes()
    assert main.main(words) == 2 and "is there already" in capsys.readouterr().err
    assert path.read_bytes() == content
    words[-1] = str(tmp_path / "nowhere/b.tar.xz")
    assert main.main(words) == 2 and "no file can be made" in capsys.readouterr().err
    words[-1] = str(path)
    path.unlink()

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(support_bundle, "collect", fails)
        assert main.main(words) == 130 and not path.exists()
    path.symlink_to(tmp_path / "elsewhere")
    assert main.main(words) == 2 and not (tmp_path / "elsewhere").exists()
