# SPDX-License-Identifier: Apache-2.0
"""A backup of a running VM with a disk on Ceph and one on its host is killed on that host after each kind of
its effects, and made again from the same increment.
"""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, ContextManager, Dict, Iterator, List, Set

import pytest

from increments.mixed import Mixed
from lab import NodeProcess, fork_server
from lab.cloud import Cloud
from lab.node import Node
from semishared.config import Config
from semishared.errors import SemisharedError
from semishared.model import steps as s
from semishared.wire import messages
from semishared.wire import session as ssh


@pytest.fixture(autouse=True)
def only_this_test(cloud: Cloud) -> Iterator[None]:
    yield
    cloud.delete_all()


TRACE = "/var/tmp/increments-points"
Sessions = Callable[[Dict[str, str]], ContextManager[ssh.Session]]


@contextmanager
def on(node: Node) -> Iterator[Sessions]:
    """Yield what talks to a host side of a host, started with an environment beside its own."""
    node.path("/var/tmp/fork_server.py").write_text(Path(fork_server.__file__).read_text())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = ["/usr/bin/python3", "-I", "/var/tmp/fork_server.py", "--ceph", "/var/tmp/one/lib"]
    process: NodeProcess = node.popen(argv, stdin=theirs)
    theirs.close()
    release, environment = ssh.RELEASE, node._command([], "oneadmin", None, "/")[1]  # type: ignore[attr-defined]
    try:
        assert ours.recv(100) == b"ready"
        ssh.RELEASE = messages.release(str(node.path("/var/tmp/one/lib/semishared")))  # type: ignore[attr-defined]

        @contextmanager
        def begun(extra: Dict[str, str]) -> Iterator[ssh.Session]:
            ssh.subprocess = fork_server.Starter(ours, {**environment, **extra})  # type: ignore[assignment, attr-defined]
            try:
                session = ssh.Session("localhost", "test", Config())
            finally:
                ssh.subprocess = subprocess  # type: ignore[attr-defined] # replaced above
            with session:
                yield session

        yield begun
    finally:
        ssh.RELEASE = release  # type: ignore[attr-defined]
        ours.close()
        process.wait()


def back_up(mixed: Mixed) -> s.BackUp:
    """Return the step of the next increment."""
    directory, disks = mixed.cloud.vm_dir(mixed.vm), sorted(mixed.model.numbers.values())
    ids = tuple(str(number) for number in disks)
    step = s.BackUp(
        mixed.vm, directory, f"{directory}/backup", ids, f"one-{mixed.vm}", "NONE", "PFZNPjwvVk0+"
    )
    return step._replace(**mixed.kept.asked())


@pytest.mark.long
@pytest.mark.fault(90, "an increment of a disk on Ceph has what changed alone")
def test_backup_of_a_mixed_vm_that_was_killed_is_made_again(
    cloud: Cloud, os_image: int, tmp_path: Path
) -> None:
    mixed = Mixed(cloud, os_image, tmp_path, "killed", ("in-place", "overlay"))
    host = cloud.lab.node("h1")
    kept, write = mixed.kept, mixed.model.write
    kept.back_up()
    write("first", 1024, 64)
    kept.back_up()
    write("second", 1280, 64)
    with on(host) as session:
        with session({"SEMISHARED_TRACE": TRACE}) as whole:
            whole.run([back_up(mixed)])
        points = [line.split(" ", 1)[1] for line in host.path(TRACE).read_text().splitlines()]
        assert points.index("guest frozen") < points.index("snapshot made") < points.index("backup job begun")
        assert points.index("backup job begun") < points.index("guest awake") < points.index("disk copied")
        seen: Set[str] = set()
        wrong: List[str] = []
        for at, point in enumerate(points, 1):
            if point in seen:
                continue
            seen.add(point)
            with pytest.raises(SemisharedError), session({"SEMISHARED_KILL_AT": str(at)}) as killed:
                killed.run([back_up(mixed)])
            write(f"after-{at}", 2048 + 64 * at, 64)
            kept.back_up()
            found = [f"{disk} is whole: {why}" for disk, why in kept.whole[-1].items()]
            if len(mixed.marks()) != 1 or set(mixed.marks().values()) != {2}:
                found.append(f"marks {mixed.marks()}")
            wrong += [f"killed after {point}: {what}" for what in found]
    assert not wrong, "\n".join(wrong)
    deadline = time.monotonic() + 30
    argv = ["virsh", "-q", "-c", "qemu:///system", "domstate", f"one-{mixed.vm}"]
    while host.run(argv).stdout.strip() != b"running":
        assert time.monotonic() < deadline, "the guest stands still"
        time.sleep(0.1)
    kept.check()
    cloud.terminate(mixed.vm)
    assert mixed.marks() == {} and cloud.left_in_pool() == [] and cloud.leftovers() == []
