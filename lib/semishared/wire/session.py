# SPDX-License-Identifier: Apache-2.0
"""A session with a host: one ssh per host and action; the front-end sends plans and receives events.

The front-end itself is a host too, without ssh. The front-end gives a host up that says nothing for
`silence_timeout_s` (a host side reports every 5 s that it is alive), as oned sets no limit. ssh's own limit
does not suffice: a shared connection (ControlMaster) has the keep-alive that its master was started with.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence, TypeVar

from ..config import Config
from ..errors import (
    FalseAnswer,
    HostFailed,
    HostOutdated,
    HostUnreachable,
    OldPython,
    SemisharedError,
    WouldChange,
    from_id,
)
from ..model import answers
from ..model.steps import Step, is_look, to_data
from ..tools import progress
from ..tools import run as tools_run
from ..tools.ending import LOOK_S, ended_within
from ..tools.run import environment, read_ends
from ..tools.this_machine import is_here
from .messages import RELEASE, Message, Part, Reader, Silence, Writer

# What the front-end accepts from a host during a plan: answers of the right shape (model/answers.py), and a
# limited number of messages.


MOST_KEPT = 10_000
"""Most messages kept of a host during a write to it, and most lines of it for the log."""
MOST_EVICTED = 100
"""Most bases of one conversation that the trail has as removed by the machine itself."""
MOST_SAID = 1 << 21
"""Most messages of a host during one plan: signs of life and progress, seconds apart, and questions."""


class Hearing:
    """The messages of a host during one plan: their shape (model/answers.py) and their number."""

    def __init__(self, host: str, steps: Sequence[type[Step]] = ()) -> None:
        self._host, self._steps, self._count = host, steps, 0
        self._may_send = any(step.__name__ in answers.SENDING for step in steps)

    def check(self, message: Message | Part, kept: int) -> None:
        """Raise FalseAnswer for a message that no host side sends, or too many; `kept`: unread messages."""
        if isinstance(message, dict):
            self._count += 1
            if message.get("event") != "alive":
                answers.heard(self._host, self._steps, message)
        elif not self._may_send:
            raise FalseAnswer(f"host {self._host} has sent data that nobody has asked for")
        if self._count > MOST_SAID or kept > MOST_KEPT:
            raise FalseAnswer(f"host {self._host} talks without end")


if TYPE_CHECKING:
    from ..model.disk.acquired import Given

PYTHON = "/usr/bin/python3"
HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "hostside.py")
Heard = TypeVar("Heard", Message, Part)
T = TypeVar("T")

front_ends: set[str] = set()
"""Other front-ends of this zone, as far as known (front/front_ends.py). They have the package where this one
has it, in remotes/; hosts have it where `onehost sync` puts it.
"""

_looks_only = False


@contextmanager
def looking_only() -> Iterator[None]:
    """Refuse, within the block, to send a step that changes anything: begin() raises WouldChange."""
    global _looks_only
    was, _looks_only = _looks_only, True
    try:
        yield
    finally:
        _looks_only = was


def ssh_to(connect_s: int) -> list[str]:
    """Return ssh's words before a host: it asks nothing, does not wait for a host that is gone, and says why
    it fails, without sshd's banner before that.
    """
    alive = ["-o", "ServerAliveInterval=5", "-o", "LogLevel=ERROR"]
    return ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_s}", *alive]


def first_answer(
    machines: Sequence[str],
    ask: Callable[[str], T],
    passed_over: Callable[[str, HostUnreachable], None] = lambda machine, error: None,
) -> T:
    """Return what the first of several machines that can be reached says; raise HostUnreachable if none can.

    A machine that is lost in the midst of it is passed over too, so `ask` may be done twice.
    """
    silent = []
    for machine in machines:
        try:
            return ask(machine)
        except HostUnreachable as e:
            silent.append(e.detail)
            passed_over(machine, e)
    raise HostUnreachable("; ".join(silent))


class Session:
    """A conversation with the host side; `with Session(...) as session: session.run([...])`."""

    def __init__(
        self, host: str, action: str, config: Config, *, bulk: bool = False, address: str = ""
    ) -> None:
        """`address`: where the host takes bulk data; ssh goes to its name if that cannot be reached."""
        self.host = host
        self.address = address
        """Where ssh reaches the host, '' for by its name."""
        self.moved: dict[str, int] = {}
        """Bytes by kind (tools/progress.py)."""
        self.came: dict[str, int] = {}
        """Bytes by where they came from."""
        self.evicted: list[str] = []
        """Bases that the machine has removed for room by its own decision, at most MOST_EVICTED."""
        self.seconds = 0.0
        """Seconds that plans took in which bytes were moved."""
        self.on_job: Callable[[object], None] | None = None
        """Called with what the machine moves, as it says itself, with its signs of life."""
        self.warnings: list[str] = []
        """Lines of the host for the log."""
        self.seq = -1
        """SEQ of the last history record of the plans' VM, -1 if it is unknown."""
        self.given: Mapping[int, Mapping[int, Given]] = {}
        """The disks that oned knows of each VM, by VM id: hosts compare their records with them."""
        self.is_busy = False
        """A plan was sent and has neither ended nor failed: no other one can be sent."""
        self._hearing = Hearing(host)
        self._action = action
        self._config = config
        if is_here(host):
            argv, self.address = [PYTHON, "-IS", HERE], ""
        else:
            connect_s = config.hosts_connect_timeout_s
            synced = f"{config.hosts_scripts_dir}/lib/semishared/hostside.py"
            command = f"exec {PYTHON} -IS {HERE if host in front_ends else synced}"
            rest = ["-o", "ServerAliveCountMax=3"]
            known_as = host
            if bulk or address:
                from . import ssh

                options, known_as = ssh.bulk_options(host)
                # Bulk data through a shared connection would hold up every other action to that host.
                rest += ["-o", "ControlMaster=no", "-o", "ControlPath=none", *options]
            rest += ["--", host, command]
            argv = self._by_name = [*ssh_to(connect_s), *rest]
            if address:
                connect_s = min(connect_s, ssh.ADDRESS_CONNECT_S)
                argv = [*ssh_to(connect_s), *ssh.at_address(address, known_as), *rest]
        # Not a pipe: an ssh master that outlives this session would hold it open.
        self._stderr = os.memfd_create("stderr")
        env = environment()
        for name in ("SEMISHARED_KILL_AT", "SEMISHARED_STOP_AT", "SEMISHARED_TRACE"):
            if name in os.environ:
                env[name] = os.environ[name]
        self._argv, self._env, self._refusals = argv, env, 0
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=self._stderr, env=env, start_new_session=True
        )
        assert self._process.stdin and self._process.stdout
        there = self._process.stdin.fileno()
        self._unread = os.open(f"/proc/self/fd/{there}", os.O_RDONLY) if argv[0] == "ssh" else -1
        """The read end of ssh's stdin, until the host answers: a restarted ssh reads it from there."""
        if bulk and argv[0] == "ssh":
            tools_run.widen(there)
            tools_run.widen(self._process.stdout.fileno())
        self._writer = Writer(there, self._wait_to_write)
        self._reader = Reader(self._process.stdout.fileno(), greets=argv[0] == "ssh")
        self._heard: deque[Message] = deque()
        self._heard_at = self._listened_at = self._begun_at = time.monotonic()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close(is_over=error is None)

    def close(self, *, is_over: bool = True) -> None:
        """End the conversation; wait for the host side only if `is_over`."""
        assert self._process.stdin and self._process.stdout
        # Other threads may still send to this host.
        self._writer.end()
        try:
            self._process.stdin.close()
        except OSError:
            pass
        self._keep_no_more()
        if is_over:
            ended_within(self._process, 5)
        self._process.kill()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            pass  # the local host side, in a system call on hung storage
        self._process.stdout.close()
        os.close(self._stderr)

    def run(
        self,
        steps: Iterable[Step],
        data: Iterable[bytes] = (),
        sha256: str = "",
        answer: Callable[[dict[str, object]], object] | None = None,
    ) -> list[Any]:
        """Execute `steps` and return their results; `data` goes to the step that receives.

        With `answer`, the host may ask ({"event": "ask", ...}), and `answer` returns the reply.
        """
        self.begin(steps, answers=answer is not None)
        for chunk in data:
            self.send_data(chunk)
        if sha256:
            self.send(end=True, sha256=sha256)
        return self.finish(answer)

    def ask(self, step: Step[T], answer: Callable[[dict[str, object]], object] | None = None) -> T:
        """Execute a step and return its answer; with `answer` as `run`."""
        found: T
        (found,) = self.run([step], answer=answer)
        return found

    def agree(self) -> None:
        """Raise the host's error if it cannot work with this front-end, before another machine acts."""
        self.run([])

    def begin(self, steps: Iterable[Step], answers: bool = False, last: bool = False) -> None:
        """Send a plan; `answers`: the host may ask meanwhile; `last`: no other plan follows.

        A host that is cut off during its last plan ends by itself, without waiting for ssh to end.
        """
        steps = list(steps)
        if _looks_only and (changing := [type(step).__name__ for step in steps if not is_look(step)]):
            raise WouldChange(f"{changing[0]} on {self.host} was not sent: this is to change nothing")
        plan = {
            "version": RELEASE,
            "action": self._action,
            "seq": self.seq,
            "steps": [to_data(step) for step in steps],
            "answers": answers,
            "last": last,
            "standstill_s": self._config.hosts_standstill_timeout_s,
        }
        if progress.asked_by:
            plan["by"] = progress.asked_by
        if self.given:
            plan["given"] = [
                [vm, [[disk, one.to_data()] for disk, one in disks.items()]]
                for vm, disks in self.given.items()
            ]
        self._hearing = Hearing(self.host, [type(step) for step in steps])
        self.is_busy = True
        # A host without a plan is silent.
        self._heard_at = self._begun_at = time.monotonic()
        self.send(plan=plan)

    def send(self, **message: object) -> None:
        """Send a message to the running plan; if the host is gone, the next `read` reports why."""
        try:
            self._writer.send(**message)
        except BrokenPipeError:
            pass

    def send_data(self, chunk: bytes) -> None:
        """Send a chunk of data to the running plan; raise the host's error if it is gone."""
        try:
            self._writer.send_data(chunk)
        except BrokenPipeError:
            self.finish()
            raise HostFailed(f"host {self.host} stopped listening") from None

    def read(self, within_s: float | None = None) -> Message:
        """Return the next chunk or message, without signs of life and warnings; raise the host's error.

        With `within_s`, return None if there was none in that time.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        while True:
            message = self._heard.popleft() if self._heard else self._next(deadline, self._reader.read)
            if not isinstance(message, dict) or message.get("event") not in ("alive", "warning"):
                return message
            if "text" in message and len(self.warnings) < MOST_KEPT:
                self.warnings.append(str(message["text"]))

    def read_into(self, room: Callable[[], memoryview], within_s: float) -> Part:
        """As `read`, but write data into `room()`; return a view of the part that has arrived."""
        deadline = time.monotonic() + within_s
        while True:
            message = self._next(deadline, lambda seconds: self._reader.read_into(room, seconds))
            if not isinstance(message, dict) or message.get("event") not in ("alive", "warning"):
                return message

    def _next(self, deadline: float | None, read: Callable[[float], Heard]) -> Optional[Heard]:
        limit = self._config.hosts_silence_timeout_s
        if time.monotonic() - self._listened_at > limit / 2:
            # A process that forwards to a busy receiver does not read meanwhile: its unread messages are no
            # silence.
            self._heard_at = max(self._heard_at, time.monotonic() - limit / 2)
        while True:
            silence = self._heard_at + limit
            until = silence if deadline is None else min(deadline, silence)
            try:
                message = read(max(until - time.monotonic(), 0.001))
            except Silence:
                self._listened_at = time.monotonic()
                if until < silence:
                    return None
                raise self._silent() from None
            self._heard_at = self._listened_at = time.monotonic()
            if message is not None:
                break
            if not self._begun_again():
                raise self._lost()
        if self._unread >= 0:
            self._keep_no_more()
        self._hearing.check(message, len(self._heard))
        if self.on_job and isinstance(message, dict) and "job" in message:
            self.on_job(message["job"])
        if isinstance(message, dict) and message.get("event") in ("done", "error"):
            self.is_busy = False
            gone = message.get("evicted")
            if isinstance(gone, list):
                self.evicted = (self.evicted + gone)[:MOST_EVICTED]
        if isinstance(message, dict) and message.get("event") == "error":
            raise from_id(str(message.get("id")), str(message.get("detail")))
        return message

    def _keep_no_more(self) -> None:
        if self._unread >= 0:
            os.close(self._unread)
        self._unread = -1

    def _begun_again(self) -> bool:
        """Start ssh again if it ended before the host read anything: sshd refused it, or did not answer at
        the address; return False otherwise.
        """
        if self._unread < 0 or ended_within(self._process, 5) != 255:
            return False
        from . import ssh

        if self.address and ssh.is_unread(self._unread, self._writer.written):
            why = self._said() or "ssh gave no reason"
            self.warnings.append(f"{self.host} by its name, not at {self.address} ([network] bulk): {why}")
            self._argv, self.address = self._by_name, ""
            there = (self._argv, self._unread, self._stderr, self._env)
            self._process = ssh.begun_again(self._process, 0, *there)
            return True
        if not ssh.is_refusal(self._said(), self._unread, self._writer.written):
            return False
        self._refusals += 1
        if self._refusals > len(ssh.PAUSES_S):
            return False
        pause_s, there = ssh.PAUSES_S[self._refusals - 1], (self._argv, self._unread, self._stderr, self._env)
        self._process = ssh.begun_again(self._process, pause_s, *there)
        return True

    def _silent(self) -> HostUnreachable:
        limit_s = self._config.hosts_silence_timeout_s
        return HostUnreachable(f"host {self.host} has said nothing for {limit_s} s during {self._action}")

    def _wait_to_write(self) -> None:
        """Wait until the host reads more, and keep its messages; signs of life extend the limit."""
        assert self._process.stdin and self._process.stdout
        deadline = time.monotonic() + self._config.hosts_silence_timeout_s
        while True:
            left = deadline - time.monotonic()
            readable, writable = tools_run.wait_to_read_or_write(
                self._process.stdout.fileno(), self._process.stdin.fileno(), left
            )
            if writable:
                return
            if not readable:
                raise self._silent()
            # A short time only: an ssh that was started again is silent until more is written to it.
            message = self._next(time.monotonic() + LOOK_S, self._reader.read)
            if isinstance(message, bytes) or (message and message.get("event") != "alive"):
                self._heard.append(message)
            deadline = time.monotonic() + self._config.hosts_silence_timeout_s

    def finish(self, answer: Callable[[dict[str, object]], object] | None = None) -> list[Any]:
        """Wait for the end of the plan and return the results of its steps; `answer` the host's questions."""
        while True:
            message = self.read()
            if answer and isinstance(message, dict) and message.get("event") == "ask":
                self.send(answer=answer(message))
            if isinstance(message, dict) and message.get("event") == "done":
                results = message.get("results")
                for mine, said in ((self.moved, message.get("moved")), (self.came, message.get("came"))):
                    if isinstance(said, dict):
                        for name, size in said.items():
                            mine[name] = mine.get(name, 0) + size
                if message.get("moved"):
                    self.seconds += time.monotonic() - self._begun_at
                return results if isinstance(results, list) else []

    def _said(self) -> str:
        return " ".join(read_ends(self._stderr).decode("utf-8", "replace").split())

    def _lost(self) -> SemisharedError:
        """Return the error for a host side that ended without an answer."""
        code = ended_within(self._process, 5) or 0
        said = self._said()
        greeting = bytes(self._reader.greeting[:200])
        if said.startswith(f"{OldPython.id} "):
            return OldPython(said[len(OldPython.id) + 1 :].partition(";")[0])
        if code == 255:
            times = f" ({self._refusals} times: MaxStartups of its sshd?)" if self._refusals > 1 else ""
            return HostUnreachable(f"host {self.host}: {said or 'ssh gave no reason'}{times}")
        if "can't open file" in said or code in (126, 127):
            return HostOutdated(f"host {self.host} has no semishared installed")
        if greeting and not said:
            said = f"only its login shell has said something: {greeting!r}"
        what = f"ended with code {code} during {self._action}"
        return HostFailed(f"host {self.host} {what}: {said or 'it said nothing'}")
