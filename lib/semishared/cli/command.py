# SPDX-License-Identifier: Apache-2.0
"""What the subcommands share: hosts asked all at once, output, progress, consent to a removal.

A host that is down costs seconds and is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Callable, Optional, Sequence, TypeVar

from .. import NAME
from ..config import Config
from ..errors import BadArguments, SemisharedError
from ..model.disk import names as disk_names
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.xml import Host
from ..wire.session import Session

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def done(self) -> None:
        """Count one."""
        self._count += 1

    def _show(self) -> None:
        began = time.monotonic()
        shown = False
        while not self._ended.wait(0.5):
            if time.monotonic() - began >= QUIET_S:
                print(
                    f"\r{self._what}: {self._count} of {self._total} ...", end="", file=sys.stderr, flush=True
                )
                shown = True
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def shown(text: object, to: Optional[IO[str]] = None) -> str:
    """Return a text as a terminal may have it: one line.

    Names from stores, hosts and OpenNebula control nothing: `?` stands for each control character (ESC,
    U+009B, newline), each that turns the direction of writing, each half of a surrogate pair, and each that
    the terminal's locale has not.
    """
    encoding = getattr(to or sys.stdout, "encoding", None) or "utf-8"  # a file in memory has none
    return (
        "".join(c if c.isprintable() else "?" for c in str(text)).encode(encoding, "replace").decode(encoding)
    )


def put(line: object = "", to: Optional[IO[str]] = None, flush: bool = False) -> None:
    """Print one line."""
    print(shown(line, to), file=to or sys.stdout, flush=flush)


def put_all(text: str, to: Optional[IO[str]] = None) -> None:
    """Print lines that are ours: in what was not written by us a newline is a line too."""
    for line in text.removesuffix("\n").split("\n"):
        put(line, to)


def put_json(data: object, indent: Optional[int] = 1) -> None:
    """Print data as JSON, in which all but ASCII is escaped."""
    print(json.dumps(data, indent=indent), flush=True)


def table(lines: list[list[str]]) -> None:
    """Print rows as columns."""
    lines = [[shown(word) for word in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        put("  ".join(word.ljust(width) for word, width in zip(line, widths)).rstrip())


AT_ONCE = 32
"""Hosts asked at the same time."""
Answer = TypeVar("Answer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe how hosts are named on the command line."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--hosts", metavar="A,B", help="these hosts, by their names in OpenNebula")
    which.add_argument("--cluster", metavar="C", help="the hosts of a cluster, by its name or id")
    which.add_argument("--all", action="store_true", help="all hosts (default)")


def chosen(hosts: list[Host], arguments: argparse.Namespace) -> list[Host]:
    """Return the hosts that the arguments name; raise BadArguments for one that OpenNebula does not know."""
    if arguments.hosts is not None:
        return named(hosts, arguments.hosts)
    if arguments.cluster is not None:
        found = [host for host in hosts if arguments.cluster in (host.cluster, str(host.cluster_id))]
        if not found:
            raise BadArguments(f"no cluster {arguments.cluster!r} with hosts in OpenNebula")
        return found
    return hosts


def named(hosts: list[Host], text: str) -> list[Host]:
    """Return the hosts A,B of a text; raise BadArguments for one that OpenNebula does not know."""
    by_name = {host.name: host for host in hosts}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in by_name]
    if unknown or not names:
        raise BadArguments(f"no such host in OpenNebula: {', '.join(unknown) or 'none was named'}")
    return [by_name[name] for name in dict.fromkeys(names)]


def roots(oned: Oned) -> list[str]:
    """Return where hosts have their base store: one per place of datastores, usually one."""
    ours = [store for store in oned.datastores() if NAME in (store.driver, store.text("DS_MAD"))]
    return sorted(
        {disk_names.base_store(os.path.dirname(absolute(store.base_path, "BASE_PATH"))) for store in ours}
    )


@dataclass
class Survey:
    """What could not be done where."""

    errors: list[dict[str, str]] = field(default_factory=list)

    def failed(self, host: str, error: SemisharedError) -> None:
        self.errors.append({"host": host, "error": error.line()})

    def ask(
        self, hosts: list[Host], action: str, config: Config, work: Callable[[Session, Host], Answer]
    ) -> dict[str, Answer]:
        """Do `work` over one ssh to each host, all at once; return what it returned, by host. Failures are
        noted.
        """

        def one(host: Host) -> Answer | SemisharedError:
            if host.is_offline:
                return SemisharedError("is offline in OpenNebula and was not asked")
            try:
                with Session(host.name, action, config) as session:
                    return work(session, host)
            except SemisharedError as e:
                return e
            finally:
                waiting.done()

        answers = {}
        with Waiting(f"{action}: hosts", len(hosts)) as waiting, ThreadPoolExecutor(AT_ONCE) as pool:
            for host, answer in zip(hosts, pool.map(one, hosts)):
                if isinstance(answer, SemisharedError):
                    self.failed(host.name, answer)
                else:
                    answers[host.name] = answer
        return answers


def add_consent_options(parser: argparse.ArgumentParser, verbs: str = "") -> None:
    """Describe the two options; `verbs`: those that they are for, '' for all."""
    which = f"{verbs}: " if verbs else ""
    parser.add_argument(
        "--yes", action="store_true", help=f"{which}do not ask (without a terminal nothing is asked anyway)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help=f"{which}say what would be removed, remove nothing"
    )


def agreed(arguments: argparse.Namespace, what: Sequence[str]) -> bool:
    """Tell whether `what` may be removed; Ctrl-D is a no.

    The administrator at a terminal is asked, and --yes answers. A program is not asked, nor is --dry-run.
    """
    if arguments.yes or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    for line in what:
        put(line)
    try:
        answer = input("Go on? [y/N] ")
    except EOFError:
        put()
        return False
    return answer.strip().lower() in ("y", "yes")
