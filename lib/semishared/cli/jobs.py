# SPDX-License-Identifier: Apache-2.0
"""List what machines move now: disks, bases and images, how far each is, and for which verb.

  jobs            of all hosts and front-ends
  jobs --watch    again every 2 seconds, until Ctrl-C

An action is listed from its third second on, if it moves bytes, on the machine that moves them: a base that
comes from another host is there twice, where it is sent and where it arrives. What ends is not listed any
more; oned's log has what it took. ON is the machine, SINCE the time there when it began.

exit codes: 0 said, or --watch was ended; 2 a machine or oned could not be asked
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Iterable, List, Optional, Tuple

from ..config import Config, load
from ..errors import SemisharedError
from ..front import front_ends
from ..model.job_steps import WORK, Job, ListJobs, doing, far
from ..named import to_data
from ..opennebula.oned import Oned
from ..units import human
from ..wire.session import Session
from . import command as on
from . import terminal
from .command import Row, flag, put, put_json

ARGUMENTS = (
    flag("--watch", "list again every 2 seconds; with --json one object a line"),
    on.JSON,
)
EVERY_S = 2.0
"""Seconds between two lists of --watch."""
HEAD = "ON|WHAT|VM/DISK|DONE|RATE|FROM|SINCE|ASKED BY"
Found = List[Tuple[str, Job]]
"""Jobs with their machines."""


class Machines:
    """Hosts and front-ends, each with one conversation that is kept from list to list."""

    def __init__(self, oned: Oned, config: Config) -> None:
        self._oned, self._config = oned, config
        self._sessions: dict[str, Session] = {}
        self.errors: list[dict[str, str]] = []

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        for session in self._sessions.values():
            session.close(is_over=False)

    def jobs(self) -> Found:
        """Return what all of them move, by machine; note in `errors` those that could not be asked."""
        survey = on.Survey()
        hosts = self._oned.hosts()
        here = on.front_end_of(hosts)
        names = [host.name for host in hosts if not host.is_offline]
        for host in hosts:
            if host.is_offline:
                survey.offline(host)
        others = front_ends.others(self._oned)
        asked = list(dict.fromkeys([*names, here, *others]))
        found: Found = []
        for name, answer in on.at_once("jobs: machines", asked, self._ask):
            if isinstance(answer, SemisharedError):
                survey.failed(name, answer)
            else:
                found += [(name, job) for job in answer]
        self.errors = survey.errors
        return sorted(found, key=lambda item: (item[0], item[1].since, item[1].pid))

    def _ask(self, machine: str) -> list[Job]:
        session = self._sessions.get(machine)
        try:
            if session is None:
                session = self._sessions[machine] = Session(machine, "jobs", self._config)
            return session.ask(ListJobs())
        except SemisharedError:
            self._sessions.pop(machine, None)
            if session:
                session.close(is_over=False)
            raise


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared jobs`."""
    on.refuse_root("")
    with Machines(on.administrator(), load()) as machines:
        if not arguments.watch:
            _tell(arguments, machines, machines.jobs())
            return 2 if machines.errors else 0
        try:
            while True:
                _again(arguments, machines, machines.jobs())
                time.sleep(EVERY_S)
        except KeyboardInterrupt:
            return 0


def _tell(arguments: argparse.Namespace, machines: Machines, found: Found) -> None:
    if arguments.json:
        put_json({"jobs": list(map(data, found)), "errors": machines.errors})
        return
    for line in lines(found, terminal.size(sys.stdout)[0] if sys.stdout.isatty() else None):
        put(line)
    for error in machines.errors:
        on.warn(f"{error['host']}: {error['error']}")


def _again(arguments: argparse.Namespace, machines: Machines, found: Found) -> None:
    """List once more: in the place of the last list on a terminal, below it elsewhere."""
    if arguments.json:
        put_json({"jobs": list(map(data, found)), "errors": machines.errors}, None)
    elif sys.stdout.isatty():
        columns, high = terminal.size(sys.stdout)
        said = [f"{error['host']}: {error['error']}" for error in machines.errors]
        page = screen(lines(found, columns), [on.shown(line) for line in said], columns, high)
        sys.stdout.write("\x1b[H\x1b[2J" + "\n".join(page))
        sys.stdout.flush()
    else:
        _tell(arguments, machines, found)
        put(flush=True)


def screen(table: list[str], errors: list[str], columns: int, high: int) -> list[str]:
    """Return the lines that fit on a terminal: rows that do not are counted, errors come last."""
    errors = [terminal.cut(line, columns) for line in errors[: max(0, high // 4)]]
    room = max(1, high - len(errors))
    if len(table) > room:
        table = [*table[: room - 1], f"and {len(table) - room + 1} more"] if room > 1 else table[:1]
    return [terminal.cut(line, columns) for line in (*table, *errors)]


def lines(found: Found, columns: Optional[int] = None) -> list[str]:
    """Return the table; at most `columns` wide, 80 if that is not said."""
    if not found:
        return ["nothing is moved"]
    words = [list(map(on.shown, _row(item))) for item in found]
    return terminal.rows(HEAD, words, columns or terminal.USUAL[0])


def _row(item: Tuple[str, Job]) -> list[str]:
    machine, job = item
    since = time.strftime("%H:%M:%S", time.localtime(min(job.since, 1 << 40)))
    rate = f"{human(job.rate)}/s"
    what = job.action if job.step == WORK else job.step
    return [machine, what, thing(job), far(job), rate, job.source or "-", since, job.asked_by]


def thing(job: Job) -> str:
    """Return what is moved: a VM with its disk, or an image."""
    if job.vm < 0:
        return job.image or "-"
    return f"{job.vm}/{job.disk}" if job.disk >= 0 else str(job.vm)


def told(jobs: Iterable[Job]) -> str:
    """Return in words what is done to a VM: `copying, 41 %, 80.0 MiB/s from h2`; '' if nothing is."""
    said = []
    for job in jobs:
        way = f" from {job.source}" * bool(job.source) + f" to {job.target}" * bool(job.target)
        said.append(f"{doing(job)}, {far(job)}, {human(job.rate)}/s{way}")
    return "; ".join(said)


def data(item: Tuple[str, Job]) -> Row:
    """Return a job for a program."""
    machine, job = item
    row: Row = to_data(job)
    row.pop("started")
    for name in ("vm", "disk"):
        row[name] = None if row[name] < 0 else row[name]
    return {"host": machine, **row}
