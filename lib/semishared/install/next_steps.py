# SPDX-License-Identifier: Apache-2.0
"""The commands after the files are in place: hosts, then oned, then datastores.

No host may get an action of a driver that it does not have.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil

from .. import NAME
from ..errors import CannotInstall, SemisharedError
from ..named import NamedTuple
from ..tools.run import run
from .front_end import ONEADMIN, FrontEnd

LIMIT_S = 6 * 3600
"""Limit of one command: a cloud may have many hosts, and slow ones."""
SITE = ("ONE_LOCATION", "ONE_XMLRPC", "ONE_AUTH", "GEM_HOME", "GEM_PATH")
"""Variables by which OpenNebula's programs find its endpoint and their own libraries."""
HOOK = f"{NAME}-failover"
"""OpenNebula's name of the hook for hosts that fail."""
HOOK_FILE = "failover.tmpl"
"""The template of the hook, beside the `semishared` command."""


class Command(NamedTuple):
    """A command and the user that runs it."""

    user: str
    argv: tuple[str, ...]

    def line(self) -> str:
        return f"as {self.user}: {shlex.join(self.argv)}"


def commands(place: FrontEnd, uninstalled: bool) -> list[Command]:
    """Return the next commands in order; oned must first forget a driver that oned.conf does not name."""
    admin = administrator(place)
    sync = Command(admin, ("onehost", "sync", "--force"))
    restart = Command(admin, ("one", "restart"))
    if os.path.isdir("/run/systemd/system") and not place.self_contained:
        restart = Command("root", ("systemctl", "restart", "opennebula"))
    if uninstalled:
        return [restart, sync]
    return [sync, restart, Command(admin, (f"{place.remotes}/lib/{NAME}/{NAME}", "setup", "--apply"))]


def hook(command: str) -> str:
    """Return the template of a hook: OpenNebula runs `command` failover for each host in state ERROR."""
    return f"""NAME = "{HOOK}"
TYPE = "state"
RESOURCE = "HOST"
STATE = "ERROR"
REMOTE = "NO"
COMMAND = "{command} failover --hook"
ARGUMENTS = "$TEMPLATE"
ARGUMENTS_STDIN = "YES"
"""


def administrator(place: FrontEnd) -> str:
    """Return the name of the user that OpenNebula runs as."""
    try:
        return pwd.getpwuid(place.owner[0]).pw_name if place.owner[0] else ONEADMIN
    except KeyError:
        return ONEADMIN


def home(place: FrontEnd) -> str:
    """Return that user's home."""
    try:
        return pwd.getpwnam(administrator(place)).pw_dir
    except KeyError:
        return "/var/lib/one"


def change_user(user: str) -> list[str]:
    """Return the command that runs another as `user`, nothing if that is this user; raise CannotInstall."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise CannotInstall(f"there is no user {user} here") from None
    if entry.pw_uid == os.geteuid():
        return []
    if os.geteuid() != 0:
        raise CannotInstall(f"this is to be run as {user}")
    # The programs of OpenNebula look for their session in $HOME.
    os.environ.update(HOME=entry.pw_dir, USER=user)
    return ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--init-groups", "--"]


def carry_out(todo: list[Command]) -> None:
    """Run the commands; raise CannotInstall with the first that fails and the rest."""
    for number, command in enumerate(todo):
        print(command.line(), flush=True)
        try:
            if shutil.which(command.argv[0]) is None:
                raise CannotInstall(f"{command.argv[0]} is not installed here")
            said = run([*change_user(command.user), *command.argv], timeout_s=LIMIT_S, keep=SITE)
        except SemisharedError as e:
            left = "; ".join(item.line() for item in todo[number:])
            raise CannotInstall(f"the files are in place, but {e.detail}. Still to do: {left}") from None
        for line in said.splitlines():
            print(f"  {line}")
