# SPDX-License-Identifier: Apache-2.0
"""One action under way, and its plan carried out on every machine (plans yield: model/exchange.py)."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Callable, ContextManager, Dict, Iterator, List

from ..config import NONE, Config, load
from ..model.disk import names as disk_names
from ..model.exchange import (
    AskOned,
    Download,
    End,
    Exchange,
    Feed,
    Fetch,
    File,
    Here,
    On,
    Part,
    Relay,
    Say,
    T,
    While,
    drive,
)
from ..model.refs import Step
from ..opennebula.report import Report

if TYPE_CHECKING:
    from ..model.disk.acquired import Given
    from ..opennebula.oned import Oned
    from ..opennebula.xml import Datastore, Vm
    from ..wire.session import Session
    from .now import Now
    from .streams import Answer

CHUNK = 1 << 20
NOTED = ("CommitDisk", "FinishDisk", "RenewVm")
"""Steps whose answers the trail notes: commits, also those that oned asks for."""
OPTIONS, MAKE, BY_SIZE = "QCOW2_OPTIONS", ("clone", "ln", "mv"), "by-size"
"""What one_tm hands on from /etc/one/tmrc, to actions that make overlays; semishared.conf comes first."""


class Action:
    """The request of an action, and what every message of it carries."""

    def __init__(self, name: str, argv: list[str], report: Report) -> None:
        self.name = name
        self.argv = argv
        self.report = report
        self.config: Config = load()
        if OPTIONS in os.environ and name in MAKE and self.config.overlays_options == BY_SIZE:
            from . import stock_conf

            options = stock_conf.overlay_options(os.environ[OPTIONS])
            self.config = self.config._replace(overlays_options=options)
        self.seq = -1
        """SEQ of the VM's last history record, -1 if unknown: every message carries it (disk/epochs.py)."""
        self.vm = -1
        """The VM that its words name, -1 before they are parsed, or for an action of no VM."""
        self.given: Dict[int, Dict[int, Given]] = {}
        """By VM, the disks that oned has given it, for an action that takes what another machine has written.
        """
        self.here: Callable[[Step], Any] = _nothing
        """Carries out what plans yield for the front-end itself."""
        self.expects: Callable[[str], object] = _unprepared
        """Called before oned is asked, with the machine to which the plan will speak first."""
        self.rate = 0
        """Bytes per second at most from machine to machine, 0 for no limit."""
        self._bulk_addresses: Dict[str, str] = {}
        self._now: Now | None = None
        self.bulk = False
        """Whether it carries bulk data, which must not hold up other actions on a shared ssh connection."""
        self.began = time.monotonic()
        self.sent: List[Step] = []
        """The steps that machines were given."""
        self.moved: List[Dict[str, int]] = []
        """Bytes by kind (tools/progress.py), of each conversation."""

    def session(self, machine: str, *, bulk: bool = False) -> Session:
        """Return a conversation with a machine."""
        from ..wire.session import Session

        is_bulk = bulk or self.bulk
        address = self.bulk_address(machine) if is_bulk and self.reaches_bulk else ""
        session = Session(machine, self.name, self.config, bulk=is_bulk, address=address)
        session.seq, session.given = self.seq, self.given
        session.on_job = self._moves
        return session

    def _moves(self, job: object) -> None:
        """Have oned told what a machine moves for the VM, if the action is on one."""
        if self.vm >= 0:
            from .now import Now

            self._now = self._now or Now(self.vm)
            self._now.heard(job)

    def nothing_moves(self) -> None:
        """Have oned told that nothing is moved any more."""
        if self._now:
            self._now.end()
            self._now = None

    def bulk_address(self, machine: str) -> str:
        """Return where a machine takes bulk data, '' for by its name."""
        if self.config.network_bulk == NONE:
            return ""
        from . import bulk_network

        self._bulk_addresses = self._bulk_addresses or bulk_network.addresses(self.config)
        return bulk_network.of(machine, self._bulk_addresses)

    @property
    def reaches_bulk(self) -> bool:
        """Whether the front-end has an address in the network for bulk data itself."""
        if self.config.network_bulk == NONE:
            return False
        from . import bulk_network

        return bulk_network.is_in(self.config)

    def acquired(self, vm: Vm) -> Dict[int, Given]:
        """Return the disks that oned has given a VM, for hosts to compare; raise OnedUnavailable."""
        from ..plan.image import disk_image

        found = drive(disk_image.of_vm(vm), ask_oned)
        self.given = {vm.id: found}
        return found

    def answering(self, machine: str, steps: tuple[Step, ...]) -> ContextManager[Answer]:
        """Return a context that yields the answerer of a machine that lacks a base, or room, for `steps`."""
        return answering(root_of(steps), machine, self.config, self.report.warn)

    @contextmanager
    def counted(self, kind: str) -> Iterator[None]:
        """Leave a line of the action, of driver `kind`, for `semishared metrics` when the block ends."""
        ended: BaseException | None = None
        try:
            yield
        except BaseException as e:
            ended = e
            raise
        finally:
            from . import action_lines

            action_lines.leave(f"{kind}/{self.name}", self.began, self.sent, self.moved, ended)

    def tell(self, session: Session) -> None:
        """Log the bytes that were moved in a conversation."""
        if session.moved:
            from . import moved

            self.report.info(moved.line(session.host, session.moved, session.came, session.seconds))


class Sessions:
    """The conversations of an action: one per machine, begun when first needed and kept to the end."""

    def __init__(self, action: Action) -> None:
        self.action = action
        self._open: dict[tuple[str, bool], Session] = {}
        self._unused: Session | None = None
        """One that was begun before its first message was known."""
        self._relayed: tuple[Step, ...] = ()
        """The steps of a relay's target."""
        self._kept: list[IO[bytes]] = []
        """Fetched files without a name, there as long as they are open."""

    def __enter__(self) -> Sessions:
        self.action.expects = self.begin
        return self

    def begin(self, machine: str) -> None:
        """Begin the conversation with a machine: ssh and its host side start while the front-end prepares."""
        self._unused = self._open[machine, False] = self.action.session(machine)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> None:
        self.action.nothing_moves()
        for session in self._open.values():
            session.close(is_over=error is None and session is not self._unused)
            self.action.moved.append(session.moved)
            for text in session.warnings:
                self.action.report.warn(text)
            if session.evicted:
                from . import trail

                trail.evicted(session.host, session.evicted)
            if error is None:
                self.action.tell(session)
        for file in self._kept:
            file.close()

    def _with(self, machine: str, beside: bool) -> Session:
        """Return the conversation with a machine; `beside` the one in which it is busy."""
        session = self._open.get((machine, beside))
        if session is None or session.is_busy:
            # What was under way there failed half-way: its host side is gone, or does not listen.
            session = self._open[machine, beside] = self.action.session(machine)
        if session is self._unused:
            session.seq, session.given, self._unused = self.action.seq, self.action.given, None
        return session

    def run(
        self,
        on: On,
        source: File | Download | None = None,
        *,
        beside: bool = False,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Have a message carried out; `source` follows it; `meanwhile` runs while the machine waits."""
        session = self._with(on.machine, beside)
        self.action.sent += on.steps

        def answer(question: dict[str, object]) -> object:
            if "rests" in question and meanwhile:
                meanwhile()
                return {}
            return of_bases(question)

        with self.unless_it_breaks_off(session), self.action.answering(on.machine, on.steps) as of_bases:
            if isinstance(source, Download):
                from . import streams

                return streams.download(session, on.steps, source.url, answer)
            if source:
                return session.run(on.steps, _chunks(source), source.sha256)
            answers = session.run(on.steps, answer=answer)
        for step, said in zip(on.steps, answers):
            if type(step).__name__ in NOTED:
                from . import trail

                trail.answered(on.machine, step, said)
        return answers

    @contextmanager
    def unless_it_breaks_off(self, *sessions: Session) -> Iterator[None]:
        """Close those of `sessions` in which work is under way if the block fails: their host sides end."""
        try:
            yield
        except BaseException:
            for session in sessions:
                if session.is_busy:
                    session.close(is_over=False)
                    self._open = {key: kept for key, kept in self._open.items() if kept is not session}
            raise

    def do(self, wanted: Exchange) -> Any:
        """Do what a plan has yielded; return its answer to the plan."""
        if isinstance(wanted, On):
            return self.run(wanted)
        if isinstance(wanted, Feed):
            return self.run(wanted.target, wanted.source)
        if isinstance(wanted, While):
            return self._both(wanted)
        if isinstance(wanted, AskOned):
            return ask_oned(wanted)
        if isinstance(wanted, Here):
            return self.action.here(wanted.step)
        if isinstance(wanted, Say):
            return self._say(wanted)
        return self._stream(wanted)

    def _say(self, wanted: Say) -> None:
        for level, text in wanted.lines(*wanted.about):
            getattr(self.action.report, level)(text)

    def _stream(self, wanted: Fetch | Relay | End) -> Any:
        from . import streams

        if isinstance(wanted, End):
            target = self._open[wanted.machine, False]
            with (
                self.unless_it_breaks_off(target),
                self.action.answering(wanted.machine, self._relayed) as of_bases,
            ):
                return streams.end(target, wanted.sha256, of_bases)
        if isinstance(wanted, Fetch):
            source = self._with(wanted.source.machine, beside=False)
            with self.unless_it_breaks_off(source):
                answers, file, kept = streams.fetch(source, wanted.source.steps)
            self._kept.append(kept)
            return answers, file
        self._relayed = wanted.target.steps
        source, target = (self._with(on.machine, beside=False) for on in wanted[:2])
        with self.unless_it_breaks_off(source, target):
            action = self.action
            limits = streams.Limits(action.rate, wanted.most, action.config.hosts_standstill_timeout_s)
            return streams.relay(
                source, wanted.source.steps, target, wanted.target.steps, limits, action.report.info
            )

    def _both(self, wanted: While) -> tuple[list[Any], list[Any]]:
        found: list[Any] = []
        beside = wanted.then.machine == wanted.first.machine
        first = self.run(wanted.first, meanwhile=lambda: found.extend(self.run(wanted.then, beside=beside)))
        return first, found


def root_of(steps: tuple[Step, ...]) -> str:
    """Return the base store of what `steps` are about, '' if there is none."""
    for step in steps:
        if hasattr(step, "root"):
            return str(step.root)
        vm_dir = getattr(getattr(step, "disk", step), "vm_dir", "")
        if vm_dir:
            return disk_names.base_store_of(vm_dir)
    return ""


def _chunks(source: File) -> Iterator[bytes]:
    with open(source.path, "rb") as file:
        yield from iter(lambda: file.read(CHUNK), b"")


def ask_oned(wanted: Exchange) -> Any:
    """Return the object of oned that a plan asks for; raise as `datastore`."""
    assert isinstance(wanted, AskOned)
    from ..opennebula.oned import Oned

    if wanted.what == "datastore":
        return datastore(Oned(), wanted.id)
    if wanted.what == "front_ends":
        from . import front_ends

        return front_ends.others(Oned())
    return getattr(Oned(), wanted.what)(wanted.id)


def datastore(oned: Oned, number: int) -> Datastore:
    """Return a datastore to work with, with what the site's files say of its kind; raise BadAttribute.

    Raise LostAttributes for one that does not say any more which store is its own.
    """
    found = oned.datastore(number)
    kind = found.attribute("DISK_TYPE")
    if not kind:
        from . import noted_datastores

        return noted_datastores.whole(found)
    if kind == "RBD":
        from . import stock_conf

        return stock_conf.filled(found)
    return found


def _unprepared(machine: str) -> None:
    """Begin nothing: a rehearsal may not speak to a machine before it asks oned."""


def _nothing(step: Step) -> Any:
    raise AssertionError(f"{type(step).__name__} is nothing that this action does itself")


def carry_out(plan: Part[T], action: Action) -> T:
    """Carry out a plan, in one conversation per machine; return what it returns."""
    with Sessions(action) as sessions:
        return drive(plan, sessions.do if IN_TESTS.isdisjoint(os.environ) else _with_points(sessions.do))


IN_TESTS = frozenset(("SEMISHARED_KILL_AT", "SEMISHARED_STOP_AT", "SEMISHARED_TRACE"))
"""Variables by which a test kills a process (tools/effects.py), which no other action loads."""


def _with_points(do: Callable[[Exchange], Any]) -> Callable[[Exchange], Any]:
    """Return `do` with a point after each exchange: the front-end may be lost between any two steps."""
    from ..tools.effects import point

    def done(wanted: Exchange) -> Any:
        answer = do(wanted)
        point(f"{type(wanted).__name__} answered")
        return answer

    return done


@contextmanager
def answering(
    root: str, host: str, config: Config, warn: Callable[[str], None] | None = None
) -> Iterator[Answer]:
    """Yield the answerer of `host`, with base store `root`; at the end, note which bases the host has.

    `warn` says what becomes of holders of locks that show no life.

    What knows about staging is loaded only when the host asks: most actions are warm.
    """
    asked: set[str] = set()

    def answer(question: dict[str, object]) -> object:
        from . import questions

        if warn:
            from ..tools import locks

            locks.say = warn
        asked.add(str(question.get("name", "")))
        return questions.answer(root, question, host, config)

    has_it = False
    try:
        yield answer
        has_it = True
    finally:
        for name in asked:
            from . import questions

            questions.arrived(root, name, host, has_it)
