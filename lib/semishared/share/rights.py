# SPDX-License-Identifier: Apache-2.0
"""What only root may do to a share: by sudo, command by command, as docs/how-to/shares.md allows.

The owner of a tree is a user of a guest, and no user of this machine.

This suite cannot kill what sudo runs; it goes on when the action is killed. So the command holds the share's
lock open as its stdin, the only file that sudo leaves it: no action changes that share until the command has
ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from ..errors import NotPermitted, StoreUnavailable, ToolFailed, ToolMissing, here
from ..tools import mounts
from ..tools import run as programs
from ..tools.mounts import Mount, of

_held: list[int] = []


@contextmanager
def holding(lock: IO[str]) -> Iterator[None]:
    """Have the commands run within the block hold a lock, too."""
    _held.append(lock.fileno())
    try:
        yield
    finally:
        _held.pop()


def run(argv: list[str], *, long: bool = False, both: bool = False) -> str:
    """Run `argv` as root; return its stdout, and with `both` stderr. `long`: without a limit while it works.

    Raise NotPermitted, or as tools/run.py.
    """
    words = argv if os.geteuid() == 0 else ["sudo", "-n", "--", *argv]
    stdin = _held[-1] if _held else None
    try:
        return programs.work(words, stdin=stdin) if long else programs.run(words, stdin=stdin, both=both)
    except ToolMissing as e:
        if words is argv or not e.detail.startswith("sudo "):
            raise
        raise NotPermitted(f"{here(argv[0])} takes root, and there is no sudo") from None
    except ToolFailed as e:
        # sudo also warns, say of a name that does not resolve, and still runs the command.
        if words is argv or "sudo: " not in e.detail or not lacking([argv]):
            raise
        where = f"sudo on {os.uname().nodename}"
        if "syntax error" in e.detail:
            # It names the whole line of sudoers, several times.
            newer = (
                "ours have regular expressions, which sudo 1.9.10 has: BRIDGE_LIST can name a newer machine"
            )
            raise NotPermitted(f"{where} does not understand a line of sudoers; {newer}") from None
        raise NotPermitted(f"{where} does not let us: {e.detail}") from None


def lacking(commands: Sequence[Sequence[str]]) -> list[str]:
    """Return those of the commands that sudo would refuse to run as root; run none."""
    if os.geteuid() == 0:
        return []
    found = []
    for argv in commands:
        try:
            programs.run(["sudo", "-n", "-l", "--", *argv])
        except (ToolFailed, ToolMissing):
            found.append(" ".join(argv))
    return found


def chown(path: str, uid: int) -> list[str]:
    """Return the command that gives a path, not its content, to user and group `uid`."""
    return ["chown", "--no-dereference", f"{uid}:{uid}", "--", path]


def rm(path: str) -> list[str]:
    """Return the command that removes a tree; it follows no link and enters no mount."""
    return ["rm", "-rf", "--one-file-system", "--", path]


def give(path: str, uid: int) -> None:
    """Give a directory, not its content, to user and group `uid`; raise NotPermitted if root may not."""
    found = os.lstat(path)
    if (found.st_uid, found.st_gid) == (uid, uid):
        return
    try:
        run(chown(path, uid))
    except ToolFailed as e:
        if not mounts.of(path).type.startswith("nfs"):
            raise
        why = "is on NFS, and to that server root of this machine has to be root (no_root_squash)"
        raise NotPermitted(f"{here(path)} {why}: {e.detail}") from None


def remove(path: str) -> None:
    """Remove a tree that others could write to, with its content; it need not exist."""
    if os.path.lexists(path):
        run(rm(path), long=True)


def check_mounted(root: str, types: tuple[str, ...]) -> Mount:
    """Return the mount below a root; raise StoreUnavailable unless it is one of `types`."""
    found = of(root)
    if found.type not in types:
        raise StoreUnavailable(
            f"{here(root)} is on {found.type} ({found.point}), not on {types[0]}: is it mounted?"
        )
    return found
