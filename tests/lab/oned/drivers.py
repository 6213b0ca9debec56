# SPDX-License-Identifier: Apache-2.0
"""Run driver scripts by the rules of one_tm, one_datastore and one_vmm_exec."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Protocol, Sequence, Tuple

from .settings import Settings

_TAGGED = re.compile(r"^(ERROR|INFO|WARN|DEBUG):\s+(\d+)?\s*(.*)$")


class ActionFailed(Exception):
    """A driver action failed; the object is in the state real oned leaves it in."""


class Refused(Exception):
    """The API refused the call before any driver ran."""


class CrashTrap(AssertionError):
    """A driver printed what oned takes for something else: `SEVERITY: <digits>`, or more than one line of
    answer.
    """


@dataclass
class Done:
    """What a finished script left."""

    rc: int
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True)
class Step:
    """One command of an ssh stream to a host: argv, stdin, and a file for stdout."""

    argv: Tuple[str, ...]
    stdin: str = ""
    into: str = ""


class Runner(Protocol):
    """Where scripts run: a lab of nodes, or a directory tree of recorders."""

    def write(self, path: str, text: str) -> None:
        """Write a front-end file as oneadmin, with its directory."""

    def read(self, path: str) -> str:
        """Read a front-end file."""

    def exists(self, path: str) -> bool:
        """Tell whether a front-end file exists."""

    def local(self, argv: Sequence[str], stdin: Optional[str], environment: Dict[str, str]) -> Done:
        """Run a script on the front-end as oneadmin, nice 19, in /var/lib/one; no stdin means empty."""

    def remote(self, host: str, steps: Sequence[Step]) -> Done:
        """Run commands in one ssh stream, up to the first that fails; answer for the last one run."""


@dataclass
class Call:
    """One call of a driver script, as a test may want to look at it."""

    kind: str
    host: str
    driver: str
    action: str
    argv: List[str]
    stdin: Optional[str]
    rc: int = -1
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0


@dataclass
class Drivers:
    """The three driver processes of oned."""

    settings: Settings
    runner: Runner
    calls: List[Call] = field(default_factory=list)
    crashes: List[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Whoever came first gets what becomes free first, as from ActionManager's queue.
        counts = {
            "tm": self.settings.tm_threads,
            "datastore": self.settings.threads,
            "vmm": self.settings.threads,
        }
        self._pools = {kind: threading.BoundedSemaphore(count) for kind, count in counts.items()}

    def transfer(self, path: str) -> None:
        """Run a transfer file: line after line, the first failure ends it (one_tm)."""
        with self._pools["tm"]:
            for line in self.runner.read(path).splitlines():
                if line.strip() and not line.lstrip().startswith("#"):
                    self.tm(line.split())

    def tm(self, words: Sequence[str], stdin: Optional[str] = None, any_driver: bool = False) -> None:
        """Run one transfer command: `ACTION driver argument...`, with the suffix fall-back."""
        action, driver = words[0].lower(), words[1]
        if not any_driver and driver not in self.settings.tm_drivers:
            raise ActionFailed(f"Transfer Driver '{driver}' not available")
        directory = f"{self.settings.remotes}/tm/{driver}"
        if not self.runner.exists(f"{directory}/{action}"):
            full, dot, _ = action.rpartition(".")
            if not dot:
                raise ActionFailed(f"Driver path '{directory}/{action}' does not exists")
            if not self.runner.exists(f"{directory}/{full}"):
                raise ActionFailed(f"Driver path '{directory}/{action}' nor '{directory}/{full}' exists")
            action = full
        self._local("tm", directory, driver, action, list(words[2:]), stdin)

    def datastore(self, driver: str, action: str, request: str, stdin: str) -> str:
        """Run a datastore action; its stdout is the answer (one_datastore)."""
        with self._pools["datastore"]:
            directory = f"{self.settings.remotes}/datastore/{driver}"
            answer = self._local("datastore", directory, driver, action, [request], stdin)
            if action != "monitor" and "\n" in answer.rstrip("\n"):
                raise CrashTrap(
                    f"datastore/{driver}/{action} answers with several lines, each one a message "
                    f"to oned: {answer!r}"
                )
            return answer

    def vmm(
        self, host: str, action: str, argv: Sequence[str], vm_id: int, stdin: str, before: Sequence[Step] = ()
    ) -> str:
        """Run a hypervisor action on a host; vm id and host follow its arguments (one_vmm_exec)."""
        with self._pools["vmm"]:
            directory = f"{self.settings.host_remotes}/vmm/{self.settings.vmm_dir}"
            arguments = [*argv, str(vm_id), host]
            call = Call("vmm", host, self.settings.vmm_dir, action, arguments, stdin)
            step = Step((f"{directory}/{action}", *arguments), stdin)
            return self._finish(call, lambda: self.runner.remote(host, [*before, step]))

    def _local(
        self, kind: str, directory: str, driver: str, action: str, argv: List[str], stdin: Optional[str]
    ) -> str:
        call = Call(kind, self.settings.front_end, driver, action, argv, stdin)
        argv = [f"{directory}/{action}", *argv]
        return self._finish(call, lambda: self.runner.local(argv, stdin, self.settings.environment))

    def _finish(self, call: Call, run: _Run) -> str:
        self.calls.append(call)
        started = time.monotonic()
        done = run()
        call.rc, call.stdout, call.stderr = done.rc, done.stdout, done.stderr
        call.seconds = time.monotonic() - started
        plain, trapped = read_stderr(done.stderr)
        if trapped:
            self.crashes.extend(trapped)
            raise CrashTrap(
                f"{call.kind}/{call.driver}/{call.action} would make oned log for a VM: {trapped}"
            )
        if done.rc != 0:
            raise ActionFailed(plain)
        return done.stdout


class _Run(Protocol):
    def __call__(self) -> Done: ...


def read_stderr(stderr: str) -> Tuple[str, List[str]]:
    """Split stderr as DriverExecHelper does: untagged lines joined bare, and lines that name a number."""
    plain, trapped = "", []
    for line in stderr.splitlines():
        match = _TAGGED.match(line.strip())
        if match is None:
            plain += line.strip()
        elif match.group(2):
            trapped.append(line.strip())
    return plain.strip(), trapped
