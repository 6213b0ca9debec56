# SPDX-License-Identifier: Apache-2.0
"""One cloud of an HA group for all tests of a leader that is lost: two front-ends, two hosts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, List, Optional, Tuple

import pytest

from lab import Node
from lab.cloud import DATASTORES, SYSTEM, Cloud
from lab.oned import ActionFailed

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
TRACE = "/var/tmp/leader.trace"
STOPPED_S = 60
"""Seconds until an action has come to its point, or has ended."""


@dataclass
class Group:
    """The cloud, and which front-end leads."""

    cloud: Cloud

    @property
    def fe(self) -> Node:
        return self.cloud.lab.node("fe")

    @property
    def fe2(self) -> Node:
        return self.cloud.lab.node("fe2")

    def has(self, vm: int) -> List[str]:
        """Return the machines with a directory of a VM."""
        path = f"{DATASTORES}/{SYSTEM}/{vm}"
        lab = self.cloud.lab
        return [node.name for node in (*lab.front_ends, *lab.hosts) if node.path(path).is_dir()]

    def lose(self, node: Node) -> None:
        """Cut the power of a front-end."""
        rpc = self.cloud.oned.rpc
        assert rpc
        rpc.leave(node.pid)
        node.kill()

    # -- a leader that is lost -----------------------------------------------------------------------

    def _within(self, **variables: str) -> None:
        oned = self.cloud.oned
        environment = {
            name: value
            for name, value in oned.settings.environment.items()
            if not name.startswith("SEMISHARED_")
        }
        oned.settings = replace(oned.settings, environment={**environment, **variables})
        oned.drivers.settings = oned.settings
        oned.runner.environment = oned.settings.environment  # type: ignore[attr-defined]

    def command(self, *words: str) -> str:
        """Run `semishared` on the leader; return what it says, raise ActionFailed with its errors."""
        environment = self.cloud.oned.settings.environment
        variables = {name: value for name, value in environment.items() if name.startswith("SEMISHARED_")}
        done = self.leader.run([COMMAND, *words], env=variables, check=False, timeout=300)
        if done.returncode:
            raise ActionFailed(done.stderr.decode() or f"{words[0]} ended with {done.returncode}")
        return done.stdout.decode()

    def points(self, act: Callable[[], object]) -> List[str]:
        """Have something done by the leader; return the points that its processes have passed."""
        trace = self.leader.path(TRACE)
        trace.unlink(missing_ok=True)
        self._within(SEMISHARED_TRACE=TRACE)
        try:
            act()
        finally:
            self._within()
        lines = trace.read_text().splitlines() if trace.exists() else []
        trace.unlink(missing_ok=True)
        return lines

    @property
    def leader(self) -> Node:
        return self.cloud.lab.node(self.cloud.oned.settings.front_end)

    def lose_leader_at(self, act: Callable[[], object], number: int) -> Optional[str]:
        """Cut the leader's power when one of its processes has come to a point; have the other one lead.

        Return how the action failed, None if it was done before any came there: then nothing is cut.
        """
        lost = self.leader
        thread, failed = self._stopped_at(act, number)
        if thread is None:
            return None
        self.lose(lost)
        thread.join()
        self.cloud.lead(self._other(lost))
        return failed[0] if failed else ""

    def depose_leader_at(self, act: Callable[[], object], number: int) -> Optional[Callable[[], None]]:
        """Have the other one lead when a process of the leader has come to a point, where that stays.

        Return what lets it go on, until its action has ended; None as `lose_leader_at`.
        """
        deposed = self.leader
        thread, _ = self._stopped_at(act, number)
        if thread is None:
            return None
        self.cloud.lead(self._other(deposed))
        # The oned of another leader waits for none of its actions.
        self.cloud.oned.forget_actions()

        def go_on() -> None:
            deposed.run(["kill", "-CONT", *map(str, stopped(deposed))])
            thread.join()

        return go_on

    @staticmethod
    def _other(node: Node) -> str:
        return "fe2" if node.name == "fe" else "fe"

    def _stopped_at(
        self, act: Callable[[], object], number: int
    ) -> Tuple[Optional[threading.Thread], List[str]]:
        """Begin something, until a process of the leader has come to a point; None if none came there.

        Return the thread that waits for its end, and how it failed, once it has.
        """
        failed: List[str] = []

        def work() -> None:
            try:
                act()
            except ActionFailed as e:
                failed.append(str(e))

        self._within(SEMISHARED_STOP_AT=str(number))
        thread = threading.Thread(target=work)
        thread.start()
        try:
            deadline = time.monotonic() + STOPPED_S
            while thread.is_alive() and not stopped(self.leader):
                assert time.monotonic() < deadline, f"no process came to point {number}"
                time.sleep(0.02)
        finally:
            self._within()
        if thread.is_alive():
            return thread, failed
        assert not failed, failed
        return None, failed


def stopped(node: Node) -> List[int]:
    """Return the processes of a node that wait where they stopped themselves."""
    found = []
    for entry in os.scandir(node.path("/proc")):
        if entry.name.isdigit():
            try:
                said = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            if said[:1] == ["T"]:
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="session")
def group() -> Iterator[Group]:
    with Cloud.up(hosts=2, front_ends=2) as up:
        yield Group(up)


@pytest.fixture(autouse=True)
def _led_by_the_first(group: Group) -> Iterator[None]:
    """Each test begins with both up, and `fe` leading."""
    yield
    for node in group.cloud.lab.front_ends:
        node.start()
    group.cloud.lead("fe")
    group.cloud.delete_all()
