# SPDX-License-Identifier: Apache-2.0
"""Which hosts a command is about, and asking them all at once; a dead one costs seconds and is reported."""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable, TypeVar

from .. import NAME
from ..config import Config
from ..errors import BadArguments, SemisharedError
from ..model import layout
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.xml import Host
from ..wire.session import Session
from .waiting import Waiting

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
        {layout.base_store(os.path.dirname(absolute(store.base_path, "BASE_PATH"))) for store in ours}
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
