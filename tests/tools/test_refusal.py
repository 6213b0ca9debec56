# SPDX-License-Identifier: Apache-2.0
"""Hosts whose sshd turns some of us away when many come at once: ssh is begun again, and what was said is not
lost with it.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Callable, Iterator

import pytest

from lab import forks
from semishared.config import Config
from semishared.errors import HostUnreachable, SemisharedError
from semishared.model import steps as s
from semishared.wire import session, ssh
from semishared.wire.session import Session
from tools.world import MiB, World

ROOT = Path(__file__).resolve().parents[2]
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")
HOST = "turning-away"
AT_ONCE = 30
REFUSAL = (
    "kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.0.0.1 port 22"
)
CONFIG = Config(hosts_scripts_dir=str(ROOT))


def put_in_path(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have `ssh` be a script, as OpenNebula's front-ends have it too."""
    directory.mkdir()
    (directory / "ssh").write_text(f"#!/bin/bash\n{script}\n")
    (directory / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


@pytest.fixture()
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], int]]:
    """Return what makes an sshd with its defaults known to `ssh` as HOST, with more lines of its
    configuration, and returns its port.
    """
    if not SSHD:
        pytest.skip("no sshd here")
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # KexAlgorithms as in the lab: the default takes a tenth of a second of processor. HOME: so may what a
    # shell reads there.
    (keys / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {keys}/host\nAuthorizedKeysFile "
        f"{keys}/key.pub\nStrictModes no\nUsePAM no\n"
        f"PidFile none\nKexAlgorithms ecdh-sha2-nistp256\nSetEnv HOME={keys}\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    daemon = subprocess.Popen([SSHD, "-D", "-E", str(keys / "log"), "-f", str(keys / "sshd_config")])
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert daemon.poll() is None, (keys / "log").read_text()
                time.sleep(0.02)

        def known(more: str) -> int:
            (keys / "ssh_config").write_text(
                f"Host {HOST}\nHostName 127.0.0.1\nPort {port}\nUser "
                f"{getpass.getuser()}\nIdentityFile {keys}/key\nIdentitiesOnly yes\n"
                f"StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n{more}\n"
            )
            put_in_path(tmp_path / "bin", monkeypatch, f'exec /usr/bin/ssh -F {keys}/ssh_config "$@"')
            # What begins behind ssh is forked: that python starts is not the point.
            monkeypatch.setattr(session, "PYTHON", forks.python()[0])
            return port

        yield known
        subprocess.run(["ssh", "-q", "-O", "exit", HOST], check=False, stderr=subprocess.DEVNULL)
    finally:
        daemon.terminate()
        daemon.wait()


def at_once(number: int) -> list[str]:
    """Begin that many conversations with HOST at the same moment; return what went wrong in them."""
    wrong: list[str] = []
    start = threading.Barrier(number)

    def one() -> None:
        start.wait()
        try:
            with Session(HOST, "test", CONFIG) as session:
                session.agree()
        except SemisharedError as e:
            wrong.append(e.detail)

    threads = [threading.Thread(target=one) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_thirty_actions_at_once_all_reach_a_host_whose_sshd_has_its_defaults(
    sshd: Callable[[str], int], tmp_path: Path
) -> None:
    port, log = sshd(""), tmp_path / "keys/log"
    # On a machine that is slow to begin thirty, ten are never there at once: as many who say nothing are,
    # until one is turned away.
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(11)]
    wrong: list[str] = []
    actions = threading.Thread(target=lambda: wrong.extend(at_once(AT_ONCE)))
    actions.start()
    while actions.is_alive() and "past MaxStartups" not in log.read_text():
        time.sleep(0.02)
    for connection in silent:
        connection.close()
    actions.join()
    assert not wrong
    assert "past MaxStartups" in log.read_text(), "none was turned away: this has proved nothing"


def test_more_than_ten_at_once_through_one_connection(sshd: Callable[[str], int], tmp_path: Path) -> None:
    """What is more than MaxSessions the master hands back, and ssh connects by itself: it is heard as
    ever.
    """
    sshd(f"ControlMaster auto\nControlPath {tmp_path}/master\nControlPersist 60")
    subprocess.run(["ssh", HOST, "true"], check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    open_ones = [Session(HOST, "test", CONFIG) for _ in range(12)]
    try:
        for session in open_ones:
            session.agree()
    finally:
        for session in open_ones:
            session.close()


def refusing(
    top: Path, monkeypatch: pytest.MonkeyPatch, times: int, said: str = REFUSAL, before: str = ""
) -> Path:
    """Have `ssh` end so for some `times`, then start this machine's host side; return the file with a byte
    for each start.
    """
    starts = top / "starts"
    starts.write_text("")
    put_in_path(
        top / "bin",
        monkeypatch,
        f'echo -n x >> {starts}\n[ $(stat -c %s {starts}) -gt {times} ] && exec /bin/sh -c "${{@: '
        f'-1}}"\n{before}\n'
        f'echo "{said}" >&2\nexit 255',
    )
    monkeypatch.setattr(ssh, "PAUSES_S", (0.1, 0.1, 0.2, 0.2, 0.2))
    return starts


def test_what_was_said_before_ssh_is_let_in_arrives_whole(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan, and more data behind it than a pipe holds."""
    disk, raw, backup = world.disk(), world.top / "raw", world.top / "backup"
    world.on(s.PrepareVm(disk.vm, disk.vm_dir), s.CopyImage(disk, world.image(size=2 * MiB), 0))
    raw.write_bytes(os.urandom(2 * MiB))
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, backup], check=True)
    starts = refusing(world.top, monkeypatch, 3)
    whole = backup.read_bytes()
    with Session(HOST, "test", CONFIG) as session:
        data = [whole[at : at + 65536] for at in range(0, len(whole), 65536)]
        session.run([s.RestoreDisk(disk, 2 * MiB)], data=data, sha256=hashlib.sha256(whole).hexdigest())
    assert starts.stat().st_size == 4
    assert Path(disk.path).read_bytes() == raw.read_bytes()


def test_a_plan_that_comes_when_ssh_has_been_turned_away_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = refusing(tmp_path, monkeypatch, 2)
    with Session(HOST, "test", CONFIG) as session:
        session._process.wait()
        session.agree()
        session.agree()
    assert starts.stat().st_size == 3


def test_who_waits_for_several_hosts_is_not_held_up_by_one_that_turns_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(tmp_path, monkeypatch, 1)
    monkeypatch.setattr(ssh, "PAUSES_S", (10.0,))
    session = Session(HOST, "test", CONFIG)
    session.begin([])
    begun = time.monotonic()
    assert session.read(0.5) is None and time.monotonic() - begun < 2
    session.close(is_over=False)


@pytest.mark.parametrize(
    ("said", "before"),
    [
        ("ssh: connect to host h port 22: Connection refused", ""),
        ("oneadmin@h: Permission denied (publickey).", ""),
        # It has read: the host may have heard that.
        ("client_loop: send disconnect: Connection reset by peer", "head -c 1 > /dev/null"),
        (
            "channel 0: open failed: connect failed: Connection "
            "refused\nkex_exchange_identification: Connection closed",
            "",
        ),
    ],
    ids=["refused", "denied", "heard", "refused behind a jump host"],
)
def test_what_is_no_refusal_for_now_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, before: str
) -> None:
    starts = refusing(tmp_path, monkeypatch, 9, said, before)
    with (
        pytest.raises(HostUnreachable, match=said.splitlines()[0][:20]),
        Session(HOST, "test", CONFIG) as session,
    ):
        session.agree()
    assert starts.stat().st_size == 1


def test_a_host_that_turns_all_away_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = refusing(tmp_path, monkeypatch, 99)
    with pytest.raises(HostUnreachable, match="MaxStartups"), Session(HOST, "test", CONFIG) as session:
        session.agree()
    assert starts.stat().st_size == 1 + len(ssh.PAUSES_S)
