# SPDX-License-Identifier: Apache-2.0
"""`semishared SUBCOMMAND ...`, run as oneadmin on the front-end."""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import sys
from contextlib import nullcontext
from typing import Any

from .. import NAME
from ..errors import BadArguments, SemisharedError
from ..opennebula.report import drop_output, printable
from ..tools import progress
from ..tools.this_machine import login
from ..wire.session import looking_only
from . import trailed
from .command import Refused, describe, put, warn

COMMANDS = {
    "attention": "list what waits for an operator, each with its command",
    "base": "list, verify, prune and evict the bases of hosts",
    "caps": "print the Ceph keys a datastore needs, and what each may do",
    "cluster": "boot, detach or commit a set of VMs, or say where it is",
    "commit": "bring what local disks of persistent images hold to their images",
    "detach": "let running VMs go on without the store that their disks read from",
    "doctor": "look at the whole installation: what is wrong, and what mends it",
    "explain": "say what an error means, or print a page of the documentation",
    "failover": "have the VMs of a lost host come up elsewhere",
    "fence": "shut a dead host out of all stores, or let it in again",
    "gc": "remove what killed actions left over",
    "jobs": "list what machines move now, how far it is, and for which verb",
    "metrics": "write metrics of actions, hosts, bases and pools for Prometheus",
    "plan": "say what an action would do, and do nothing",
    "pool": "list, declare and check the local devices of hosts",
    "publish": "write into OpenNebula, for Sunstone, where disks are",
    "setup": "make the datastores, or print their templates and what to click",
    "share": "list, resize and look after directories for guests",
    "stage": "put bases of images onto hosts before VMs need them there",
    "status": "say where each disk lives and why, and what it needs",
    "support-bundle": "collect what a report of a fault needs, without passwords and keys",
}
"""Subcommand -> its one line of help. Each is a module here with ARGUMENTS and run(arguments) -> exit code,
its name with `_` for `-`.
"""
OPEN_FILES = 1 << 14
"""Enough for 3000 hosts."""


class _Version(argparse.Action):
    """Prints the version. What knows the commit is loaded, and git asked, for that alone."""

    def __init__(self, option_strings: list[str], dest: str, **how: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **how)

    def __call__(self, top: argparse.ArgumentParser, *_: object) -> None:
        put(importlib.import_module("..install.commit", __package__).version())
        top.exit()


def _module(command: str) -> Any:
    return importlib.import_module(f".{command.replace('-', '_')}", __package__)


def parser(command: str = "", every: bool = False) -> argparse.ArgumentParser:
    """Return the parser; only the module of `command` is imported, or that of `every` one, for its pages."""
    top = argparse.ArgumentParser(prog=NAME, description="semishared storage drivers for OpenNebula")
    top.add_argument("--version", action=_Version, help="print version and commit")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        sub = commands.add_parser(name, help=line)
        if every or name == command:
            module = _module(name)
            sub.description = module.__doc__
            # The subcommand itself reports unknown arguments: not with the usage of all subcommands.
            sub.set_defaults(refuse=sub.error)
            sub.formatter_class = argparse.RawDescriptionHelpFormatter
            describe(sub, module.ARGUMENTS)
    return top


def main(argv: list[str]) -> int:
    """Run a subcommand and return its exit code; 2 with one line on stderr if it cannot do its work."""
    open_closed_streams()
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except OSError as e:
        if not isinstance(e, BrokenPipeError):
            warn(f"{NAME}: {printable(f'{type(e).__name__}: {e}')}")
        drop_output()
        return 2
    except KeyboardInterrupt:
        return 130


def open_closed_streams() -> None:
    """Open /dev/null for closed ones of 0, 1 and 2 (`>&-`): else the next file would take their place.

    Python has None there.
    """
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest that is free is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(fd, mode, closefd=False))


def allow_open_files() -> None:
    """Raise the limit of open files: a conversation with a host has five, and a session many hosts."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _run(argv: list[str]) -> int:
    command = next((word for word in argv if not word.startswith("-")), "")
    arguments, unknown = parser(command).parse_known_args(argv)
    if unknown:
        arguments.refuse(f"unrecognized arguments: {printable(' '.join(unknown))}")
    os.umask(0o027)
    allow_open_files()
    progress.asked_by = f"{login()}/{command}"
    module = _module(arguments.command)
    changes_nothing = getattr(arguments, "dry_run", False) or arguments.command == "plan"
    try:
        with looking_only() if changes_nothing else nullcontext():
            return trailed.carried_out(module.run, arguments, argv)
    except Refused as e:
        warn(f"{NAME} {arguments.command}: {e}")
        return 2
    except SemisharedError as e:
        # The remedy for bad arguments is written for OpenNebula's arguments.
        line = f"{e.detail}; --help says what there is" if isinstance(e, BadArguments) else e.line()
        warn(f"{NAME} {arguments.command}: {printable(line)}")
        return 2
