# SPDX-License-Identifier: Apache-2.0
"""What the subcommands share: arguments as data, hosts asked all at once, output, progress, consent to a
removal.

A host that is down costs seconds and is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Callable, Iterable, Optional, Sequence, TypeVar, Union

from .. import NAME
from ..config import Config
from ..errors import BadArguments, GoneFromOned, SemisharedError
from ..model.disk import names as disk_names
from ..model.steps import Step
from ..named import NamedTuple
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore, Host, Object
from ..tools.this_machine import is_here
from ..units import amount
from ..wire.session import Session
from . import terminal

Row = dict[str, Any]


class Argument(NamedTuple):
    """Arguments of `add_argument`.

    Of those with the same word in `one_of` at most one may be given; exactly one, if the word ends in `!`.
    """

    names: tuple[str, ...]
    how: Row
    one_of: str = ""


def argument(*names: str, one_of: str = "", **how: Any) -> Argument:
    return Argument(names, how, one_of)


def rate_limit(text: str) -> Argument:
    return argument("--rate", metavar="R", help=text)


def flag(name: str, text: str, one_of: str = "") -> Argument:
    return Argument((name,), {"action": "store_true", "help": text}, one_of)


HOSTS = (
    argument("--hosts", metavar="A,B", help="these hosts, by their names in OpenNebula", one_of="hosts"),
    argument("--cluster", metavar="C", help="the hosts of a cluster, by its name or id", one_of="hosts"),
    flag("--all", "all hosts (default)", one_of="hosts"),
)
JSON = flag("--json", "one JSON object on stdout")
JSON_FOR_LINES = flag("--json", "one JSON object on stdout instead of lines")
JSON_LINES = flag("--json", "JSON lines also on a terminal; the last is the summary")


def consent(verbs: str = "") -> tuple[Argument, ...]:
    """Return the two options of a removal; `verbs`: those that have them, '' for all."""
    which = f"{verbs}: " if verbs else ""
    return (
        flag("--yes", f"{which}do not ask (without a terminal nothing is asked anyway)"),
        flag("--dry-run", f"{which}say what would be removed, remove nothing"),
    )


def describe(parser: argparse.ArgumentParser, arguments: Iterable[Argument]) -> None:
    """Add arguments to a parser."""
    groups: dict[str, Any] = {"": parser}
    for one in arguments:
        if one.one_of not in groups:
            groups[one.one_of] = parser.add_mutually_exclusive_group(required=one.one_of.endswith("!"))
        groups[one.one_of].add_argument(*one.names, **one.how)


class Refused(Exception):
    """Nothing was begun; the text follows the subcommand's name on stderr."""


def refuse_root(why: str = ": files of root would be in the drivers' way") -> None:
    """Raise Refused for root."""
    if os.geteuid() == 0:
        raise Refused(f"run this as oneadmin{why}")


def administrator() -> Oned:
    """Return oned for a user that sees all VMs; raise OnedUnavailable."""
    oned = Oned()
    oned.require_admin()
    return oned


def ours(datastores: Iterable[Datastore]) -> list[Datastore]:
    """Return those with one of our drivers."""
    return [store for store in datastores if NAME in (store.driver, store.text("DS_MAD"))]


def location(store: Datastore) -> str:
    """Return the directory above a datastore's directory on machines; raise BadArguments."""
    return os.path.dirname(absolute(store.base_path, "BASE_PATH"))


def roots(stores: Iterable[Datastore]) -> list[str]:
    """Return the base stores of hosts: one per place of datastores, usually one."""
    return sorted({disk_names.base_store(location(store)) for store in stores})


def front_end_of(hosts: Iterable[Host]) -> str:
    """Return this machine's name: OpenNebula's, if it is a host too."""
    return next((host.name for host in hosts if is_here(host.name)), os.uname().nodename)


def as_host(machine: str) -> Host:
    """Return a machine that is no host of OpenNebula's as if it were one, without an id."""
    return Host.parse(f"<HOST><NAME>{machine}</NAME></HOST>")


def rate(text: Optional[str]) -> int:
    """Return bytes per second, 0 (no limit) for None; raise BadArguments."""
    try:
        return 0 if text is None else amount(text)
    except ValueError:
        raise BadArguments(f"not a rate: {text!r}; 40M (bytes per second) is one") from None


def chosen(hosts: list[Host], arguments: argparse.Namespace) -> list[Host]:
    """Return the hosts that the arguments name; raise BadArguments for one unknown to OpenNebula."""
    if arguments.hosts is not None:
        return named(hosts, arguments.hosts)
    if arguments.cluster is not None:
        found = [host for host in hosts if arguments.cluster in (host.cluster, str(host.cluster_id))]
        if not found:
            raise BadArguments(f"no cluster {arguments.cluster!r} with hosts in OpenNebula")
        return found
    return hosts


def named(hosts: list[Host], text: str) -> list[Host]:
    """Return the hosts A,B of a text; raise BadArguments for one unknown to OpenNebula."""
    by_name = {host.name: host for host in hosts}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in by_name]
    if unknown or not names:
        raise BadArguments(f"no such host in OpenNebula: {', '.join(unknown) or 'none was named'}")
    return [by_name[name] for name in dict.fromkeys(names)]


Item = TypeVar("Item")
Answer = TypeVar("Answer")
T = TypeVar("T")
Named = TypeVar("Named", bound=Object)


def called(pool: Iterable[Named], word: str, kind: str) -> list[Named]:
    """Return the objects of that id or name; raise BadArguments if there is none."""
    found = [one for one in pool if word in (str(one.id), one.name)]
    if not found:
        raise BadArguments(f"no {kind} {word!r} in OpenNebula")
    return found


def known(question: Callable[[int], Answer], number: int, kind: str) -> Answer:
    """Return oned's answer about an object of that id; raise BadArguments if oned has none.

    The operator has named it: nothing is wrong with oned, nor with the session.
    """
    try:
        return question(number)
    except GoneFromOned:
        raise BadArguments(f"no {kind} '{number}' in OpenNebula") from None


def shown(text: object, to: Optional[IO[str]] = None) -> str:
    """Return a text as one line that is safe on a terminal.

    Names from stores, hosts and OpenNebula must control nothing: `?` stands for each control character (ESC,
    U+009B, newline), each that turns the direction of writing, each half of a surrogate pair, and each that
    the terminal's locale lacks.
    """
    encoding = getattr(to or sys.stdout, "encoding", None) or "utf-8"  # a file in memory has none
    line = "".join(c if c.isprintable() else "?" for c in str(text))
    return line.encode(encoding, "replace").decode(encoding)


def put(line: object = "", to: Optional[IO[str]] = None, flush: bool = False) -> None:
    print(shown(line, to), file=to or sys.stdout, flush=flush)


def put_all(text: str, to: Optional[IO[str]] = None) -> None:
    """Print our own lines; in text from elsewhere a newline would be a line too."""
    for line in text.removesuffix("\n").split("\n"):
        put(line, to)


SCHEMA = 1
"""Version of what --json prints (docs/reference/schemas): higher when a name goes or means something else."""


def put_json(data: Row, indent: Optional[int] = 1) -> None:
    """Print an object as JSON, in ASCII with escapes, and the version of its schema."""
    print(json.dumps({"schema": SCHEMA, **data}, indent=indent), flush=True)


def warn(line: object) -> None:
    put(line, to=sys.stderr)


def table(head: str, lines: Iterable[Sequence[str]]) -> None:
    """Print rows as columns below their heads, which `|` separates in `head`.

    On a terminal the table is as wide as that (or as COLUMNS says): the widest columns are wrapped between
    words, so that no name or number is broken. A program that reads the output gets a line for each row.
    """
    words = [[shown(word) for word in line] for line in lines]
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in terminal.rows(head, words, columns, wraps=True):
        put(line)


QUIET_S = 2


class Waiting:
    """`with Waiting("asking", 30) as waiting:` ... `waiting.done()` for each of the 30; one line that is
    rewritten.

    A terminal shows it for work that takes longer than QUIET_S; a program that reads the output sees nothing.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._count = what, total, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Waiting:
        if sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def done(self) -> None:
        self._count += 1

    def _show(self) -> None:
        began, is_shown = time.monotonic(), False
        while not self._ended.wait(0.5):
            if time.monotonic() - began >= QUIET_S:
                line = f"\r{self._what}: {self._count} of {self._total} ..."
                print(line, end="", file=sys.stderr, flush=True)
                is_shown = True
        if is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


AT_ONCE = 32
"""Machines, or stores, asked at the same time."""


def at_once(
    what: str, items: Sequence[Item], work: Callable[[Item], Answer]
) -> list[tuple[Item, Union[Answer, SemisharedError]]]:
    """Do `work` for all items at the same time; return each with its answer or error."""

    def one(item: Item) -> Union[Answer, SemisharedError]:
        try:
            return work(item)
        except SemisharedError as e:
            return e
        finally:
            waiting.done()

    with Waiting(what, len(items)) as waiting, ThreadPoolExecutor(AT_ONCE) as pool:
        return list(zip(items, pool.map(one, items)))


def ask(host: str, action: str, config: Config, step: Step[T]) -> T:
    """Return a machine's answer to a step."""
    with Session(host, action, config) as session:
        return session.ask(step)


class Survey:
    """Failures by machine: {"host": machine, `where`: machine, "error": line} for each.

    `where` is how older versions have called the host.
    """

    where = "host"

    def __init__(self) -> None:
        self.errors: list[dict[str, str]] = []

    def failed(self, machine: str, error: SemisharedError) -> None:
        self.errors.append({"host": machine, self.where: machine, "error": error.line()})

    def offline(self, host: Host) -> None:
        """Note a host that is not asked."""
        self.failed(host.name, SemisharedError("is offline in OpenNebula and was not asked"))

    def ask(
        self, hosts: list[Host], action: str, config: Config, work: Callable[[Session, Host], Answer]
    ) -> dict[str, Answer]:
        """Do `work` over one ssh to each host, all at once; return the answers by host."""

        def one(host: Host) -> Optional[Answer]:
            if host.is_offline:
                return None
            with Session(host.name, action, config) as session:
                return work(session, host)

        answers = {}
        for host, answer in at_once(f"{action}: hosts", hosts, one):
            if host.is_offline:
                self.offline(host)
            elif isinstance(answer, SemisharedError):
                self.failed(host.name, answer)
            else:
                answers[host.name] = answer
        return answers  # type: ignore[return-value]

    def told(
        self, arguments: argparse.Namespace, answer: Row, show: Callable[[], None], total: str = ""
    ) -> None:
        """Print the answer, with the errors: as JSON for a program; for a person by `show`, `total` last."""
        if arguments.json:
            put_json({**answer, "errors": self.errors})
            return
        show()
        for error in self.errors:
            warn(f"{error[self.where]}: {error['error']}")
        if total:
            put(total)


def is_asked(arguments: argparse.Namespace) -> bool:
    """Tell whether the administrator is at a terminal, and is asked for consent."""
    return not arguments.yes and sys.stdin.isatty() and sys.stdout.isatty()


def agreed(arguments: argparse.Namespace, what: Sequence[str]) -> bool:
    """Tell whether `what` may be removed; Ctrl-D is a no.

    The administrator at a terminal is asked, unless --yes is given. A program is not asked, nor is --dry-run.
    """
    if not is_asked(arguments):
        return True
    # With --json standard output is the object's alone.
    to = sys.stderr if getattr(arguments, "json", False) else sys.stdout
    for line in what:
        put(line, to)
    print("Go on? [y/N] ", end="", file=to, flush=True)
    try:
        answer = input()
    except EOFError:
        put(to=to)
        return False
    return answer.strip().lower() in ("y", "yes")
