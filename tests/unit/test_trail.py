# SPDX-License-Identifier: Apache-2.0
"""The trail: a line of JSON for what is changed, whatever names, words and errors hold; no secret in it."""

from __future__ import annotations

import argparse
import base64
import errno
import json
import os
import threading
from pathlib import Path
from typing import Any, Dict, Iterator, List
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.cli import trailed
from semishared.cli.command import Refused
from semishared.cli.main import COMMANDS
from semishared.errors import HostUnreachable
from semishared.front import trail
from semishared.model.disk import commit_steps as c
from semishared.model.refs import DiskRef
from semishared.tools import trail_lines

CEPH = base64.b64encode(b"\x01\x00" + bytes(range(26))).decode()
PASSWORD, KEY = "s3cr3t pass/word", "0123456789abcdef" * 4
SECRETS = {
    "a key of Ceph": f"caps {CEPH} for client.one",
    "a key in a keyring": f"[client.one]\n\tkey = {CEPH}\n",
    "one_auth": f"no session oneadmin:{PASSWORD} was taken",
    "its password": f"tried '{PASSWORD}'",
    "the front-ends' key": f"not the same: {KEY}",
    "a URL's password": "fetch https://anna:hunter2secret@example.org/x.qcow2 failed",
    "a URL's password with an @": "fetch ftp://anna:hunter2@secret@example.org/x failed",
    "a URL's password with a /": "fetch https://anna:hunter2/secret?x@example.org/x failed",
    "a URL's token": "git+https://ghp_hunter2secret@example.org/x",
    "a signed URL": "https://s3.example.org/x.qcow2?X-Amz-Signature=hunter2secret&b=1",
    "a URL's fragment": "s3://bucket/x#hunter2secret",
    "an option": "fence --password hunter2secret h1",
    "an option with =": "fence --passwd=hunter2secret h1",
    "quoted": 'password: "hunter2secret of two words"',
    "quoted, cut off": "passphrase='hunter2secret of two",
    "a header": "curl: Authorization: Basic hunter2secret, Proxy-Authorization: hunter2secret",
    "a private key": "-----BEGIN RSA PRIVATE KEY-----\nhunter2secret\nx\n-----END RSA PRIVATE KEY-----",
    "a private key, cut off": "-----BEGIN PRIVATE KEY----- hunter2secret more",
}
HOSTILE = [
    "two\nlines",
    'a"quote',
    "a\\back",
    "\x1b[2Jescape",
    "\u2028line\u0085next\x0bmore",
    "\ud800half",
    '"}\n{"who": "root@fe", "did": "gc"}',
    "nul\0byte",
    "name" * 1000,
]


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    auth = tmp_path / "one_auth"
    auth.write_text(f"oneadmin:{PASSWORD}\n")
    (tmp_path / "semishared_key").write_text(KEY + "\n")
    monkeypatch.setenv("ONE_AUTH", str(auth))
    monkeypatch.setenv("ONE_LOCATION", str(tmp_path))
    (tmp_path / "var").mkdir()
    return tmp_path / "var/semishared.log"


@pytest.fixture(autouse=True)
def syslog(monkeypatch: pytest.MonkeyPatch) -> List[str]:
    import syslog as module

    said: List[str] = []
    monkeypatch.setattr(module, "syslog", lambda _priority, line: said.append(line))
    return said


def rows(log: Path) -> List[Dict[str, Any]]:
    text = log.read_text("ascii")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.fault(78, "what was done is in syslog and in a log of ours: who, what, result, seconds")
def test_a_line_is_in_the_log_and_in_syslog(log: Path, syslog: List[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("SUDO_USER", "alice")
    trail.note("evict", "base 100-7-ab on h2", trail.TOLD)
    with trail.by_operator():
        trail.note("gc removal", "vm /d/101/7 on h1", seconds=0.25)
    fe = os.uname().nodename
    first, second = rows(log)
    assert (first["who"], first["did"], first["result"]) == (f"oned@{fe}", "evict", "told")
    assert second["who"] == f"alice@{fe}" and second["what"] == "vm /d/101/7 on h1"
    assert (second["result"], second["seconds"]) == ("ok", 0.25) and "seconds" not in first
    assert [json.loads(line) for line in syslog] == [first, second]
    assert log.stat().st_mode & 0o777 == 0o640


@pytest.mark.fault(78, "no known secret is in the trail")
@pytest.mark.parametrize("text", SECRETS.values(), ids=list(SECRETS))
def test_no_secret_is_in_a_line(text: str, log: Path, syslog: List[str]) -> None:
    trail.note("gc", text)
    trail.note("gc", "", text)
    for said in (log.read_text(), *syslog):
        for secret in ("hunter2", CEPH, PASSWORD, KEY):
            assert secret not in said and json.dumps(secret)[1:-1] not in said, said


@pytest.mark.parametrize("text", SECRETS.values(), ids=list(SECRETS))
def test_no_secret_of_a_verb_is_in_its_line(text: str, log: Path) -> None:
    def fails(_: argparse.Namespace) -> int:
        raise HostUnreachable(text)

    arguments = argparse.Namespace(command="gc")
    with pytest.raises(HostUnreachable):
        trailed.carried_out(fails, arguments, ["gc", "--discard", text, f"--discard={text}"])
    said = log.read_text()
    assert rows(log)[0]["result"] == "SS010"
    assert not [secret for secret in ("hunter2", CEPH, PASSWORD, KEY) if secret in said], said


def test_what_is_no_secret_stays() -> None:
    for text in (
        "base 100-7-" + "ab" * 32,
        "https://example.org/x.qcow2",
        "vm /var/lib/one/datastores/101/7 on h1",
        "VM 12 disk 0",
        "--hosts h1,h2 --rate 40M",
        "mail@example.org",
    ):
        assert trail.redacted(text) == text


@given(st.text(max_size=80), st.sampled_from(sorted(SECRETS)), st.text(max_size=80))
def test_no_text_around_a_url_shows_its_password(before: str, _: str, after: str) -> None:
    said = trail.redacted(f"{before} https://u:{quote('hunter2!')}@h/x {after}")
    assert "hunter2" not in said.replace(after, "").replace(before, "")


@pytest.mark.parametrize("text", HOSTILE)
def test_no_name_makes_a_second_line(text: str, log: Path, syslog: List[str]) -> None:
    trail.note(text, text, text)
    (row,) = rows(log)
    assert log.read_text().count("\n") == 1 and log.read_text().isascii() and len(syslog) == 1
    assert "\n" not in syslog[0] and all(c.isprintable() for c in syslog[0])
    assert set(row) == {"time", "who", "did", "what", "result"} and len(row["what"]) <= trail_lines.LONGEST


def test_lines_of_many_writers_do_not_mix(log: Path) -> None:
    def write(number: int) -> None:
        for count in range(40):
            trail.note(f"writer {number}", f"{count} " + "x" * 300)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = rows(log)
    assert len(found) == 8 * 40
    for number in range(8):
        own = [row["what"].split()[0] for row in found if row["did"] == f"writer {number}"]
        assert own == list(map(str, range(40)))


def test_a_log_that_was_renamed_is_made_anew(log: Path) -> None:
    trail.note("gc", "first")
    log.rename(f"{log}.1")
    trail.note("gc", "second")
    assert [row["what"] for row in rows(log)] == ["second"]


class Terminal(list):  # type: ignore[type-arg]
    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.append(text)


def _gone(log: Path) -> None:
    log.parent.rmdir()


def _link(log: Path) -> None:
    log.symlink_to(log.parent.parent / "one_auth")


def _directory(log: Path) -> None:
    log.mkdir()


@pytest.mark.parametrize("spoil", [_gone, _link, _directory])
def test_nothing_fails_by_the_trail(
    spoil: Any, log: Path, syslog: List[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(log)
    err = Terminal()
    monkeypatch.setattr("sys.stderr", err)
    trail.note("evict", "by oned")
    assert not err, "oned would take it for an action's line"
    with trail.by_operator():
        trail.note("gc removal", "a")
        trail.note("gc removal", "b")
    assert "".join(err).count(str(log)) == 1 and len(syslog) == 3


def test_a_disk_that_is_link_fails_nothing(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda _fd, data: len(data) // 2)
    trail.note("gc", "half")
    monkeypatch.setattr(os, "write", no_space)
    trail.note("gc", "none")


def no_space(_fd: int, _data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


# -- which runs of the command have a line -----------------------------------------------------------


def ran(line: str, code: int = 0, **said: Any) -> int:
    arguments = argparse.Namespace(command=line.split()[0], **said)
    return trailed.carried_out(lambda _: code, arguments, line.split())


def test_a_verb_has_one_line_with_its_words_and_its_end(log: Path) -> None:
    assert ran("commit web 0") == 0 and ran("commit web", code=1) == 1
    first, second = rows(log)
    assert (first["did"], first["what"], first["result"]) == ("commit", "web 0", "ok")
    assert (second["what"], second["result"]) == ("web", "exit 1") and first["seconds"] >= 0


def refused(_: argparse.Namespace) -> int:
    raise Refused("run this as oneadmin")


def interrupted(_: argparse.Namespace) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("run", "result"), [(refused, "refused"), (interrupted, "KeyboardInterrupt")])
def test_a_verb_that_does_not_end_has_its_line(run: Any, result: str, log: Path) -> None:
    with pytest.raises(BaseException, match=""):
        trailed.carried_out(run, argparse.Namespace(command="gc"), ["gc"])
    assert [row["result"] for row in rows(log)] == [result]
    trail.note("evict", "")
    assert rows(log)[-1]["who"].startswith("oned@"), "the command has ended"


def test_a_timer_has_a_line_if_something_was_done(log: Path) -> None:
    ran("stage --due", due=True)
    assert not log.exists()
    ran("stage --due", code=1, due=True)

    def detaches(_: argparse.Namespace) -> int:
        trail.note("detach disk", "VM 7 disk 0 on h1")
        return 0

    arguments = argparse.Namespace(command="detach", due=True, print_timer=False)
    trailed.carried_out(detaches, arguments, ["detach"])
    assert [row["did"] for row in rows(log)] == ["stage", "detach disk", "detach"]


LOOKING: Dict[str, Dict[str, Any]] = {
    "base": {"verb": "list"},
    "cluster": {"verb": "status"},
    "detach": {"print_timer": True},
    "doctor": {"fix": False},
    "failover": {"print_hook": True},
    "fence": {"check": True},
    "pool": {"verb": "check"},
    "setup": {"apply": False, "key": False},
    "share": {"verb": "snapshot", "words": ["list", "7"]},
}
CHANGING: Dict[str, Dict[str, Any]] = {
    "base": {"verb": "evict"},
    "cluster": {"verb": "boot"},
    "commit": {},
    "detach": {"print_timer": False},
    "doctor": {"fix": True},
    "failover": {"print_hook": False},
    "fence": {"check": False},
    "gc": {},
    "pool": {"verb": "add"},
    "setup": {"apply": False, "key": True},
    "share": {"verb": "snapshot", "words": ["remove", "7", "x"]},
    "stage": {},
}
ONLY_LOOK = {
    "attention",
    "caps",
    "explain",
    "jobs",
    "metrics",
    "plan",
    "publish",
    "status",
    "support-bundle",
}


def test_every_verb_is_known_to_change_something_or_not() -> None:
    assert {*trailed.CHANGING} == {*CHANGING} <= {*COMMANDS}
    assert {*COMMANDS} - {*CHANGING} <= ONLY_LOOK


@pytest.fixture(params=sorted(CHANGING))
def verb(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_what_only_looks_has_no_line(verb: str, log: Path) -> None:
    ran(verb, **CHANGING[verb])
    assert [row["did"] for row in rows(log)] == [verb]
    ran(verb, dry_run=True, **CHANGING[verb])
    if verb in LOOKING:
        ran(verb, **LOOKING[verb])
    assert len(rows(log)) == 1


# -- what actions do on their way --------------------------------------------------------------------


def test_a_commit_has_a_line_by_the_hosts_answer(log: Path) -> None:
    disk = DiskRef(12, 0, "/d/101/12")
    trail.answered("h1", c.CommitDisk(disk, 0), c.CommittedDisk(4096, settle={}))
    trail.answered("h1", c.FinishDisk(disk), c.CommittedDisk(0))
    kept = c.UncommittedDisk(1, 4096, "its image has changed", True, False)
    renewed = c.RenewedVm([c.RenewedDisk(0, 8192), kept], 0, ())
    trail.answered("h2", c.RenewVm(12, "/d/101/12", False), renewed)
    said = ["VM 12 disk 0 on h1: 4096 bytes", "VM 12 disk 0 on h2: 8192 bytes"]
    assert [(row["did"], row["what"]) for row in rows(log)] == [("commit disk", what) for what in said]
