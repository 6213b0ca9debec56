# SPDX-License-Identifier: Apache-2.0
"""The timer that detaches disks from stores, and publishes what Sunstone shows: units of systemd, else a file
for cron.

It is made on request, stays in an upgrade, and goes with the rest.
"""

from __future__ import annotations

import os
import re
from typing import Dict, List, Optional, Tuple

from .. import NAME
from ..errors import CannotInstall, SemisharedError
from ..named import NamedTuple
from ..tools import files
from ..tools.effects import point
from ..tools.run import run
from .front_end import FrontEnd
from .next_steps import Command, administrator
from .tree import Say

UNITS, CRON = "/etc/systemd/system", "/etc/cron.d"
NAMED = f"{NAME}-detach"
TIMER, SERVICE = f"{UNITS}/{NAMED}.timer", f"{UNITS}/{NAMED}.service"
ENABLED = f"{UNITS}/timers.target.wants/{NAMED}.timer"
"""The link by which systemd starts it at boot."""
PATHS = (ENABLED, TIMER, SERVICE, f"{CRON}/{NAMED}")
"""All its files, the one that starts the rest first."""
RUNS = "/run/systemd/system"
"""There while systemd is the machine's init (sd_booted(3))."""
ACTIVE = "ActiveState=active"
PLAIN = re.compile(r"[A-Za-z0-9_./-]+\Z")
"""Text with the same meaning for systemd, cron and a shell."""


def units(command: str, user: str) -> Dict[str, str]:
    """Return the units of systemd by their paths; raise CannotInstall."""
    _check_plain(command, user)
    what = "[Unit]\nDescription=VMs of OpenNebula let go of their images' stores\n"
    return {
        SERVICE: f"{what}After=opennebula.service\n\n"
        f"[Service]\nType=oneshot\nUser={user}\n"
        # The minus sign: a host that does not answer is no failure of the unit.
        f"ExecStart=-{command} publish --due\nExecStart={command} detach --due\n",
        TIMER: f"{what}\n[Timer]\nOnActiveSec=2min\nOnUnitInactiveSec=2min\n"
        "\n[Install]\nWantedBy=timers.target\n",
    }


def crontab(command: str, user: str) -> Dict[str, str]:
    """Return the file for cron by its path; one run at a time. Raise CannotInstall."""
    _check_plain(command, user)
    line = f"*/2 * * * * {user} flock -n {command} {command}"
    both = f"{line} detach --due >/dev/null\n*/2 * * * * {user} {command} publish --due >/dev/null\n"
    return {f"{CRON}/{NAMED}": both}


def _check_plain(*words: str) -> None:
    for word in words:
        if not PLAIN.match(word):
            raise CannotInstall(
                f"no timer can name {word!r}: have `{NAME} detach --due` started some other way"
            )


class Timer(NamedTuple):
    """The timer of the machine whose files are below `root`, '' for this one; paths are that machine's."""

    root: str
    texts: Dict[str, str]
    """Files to write."""
    gone: Tuple[str, ...]
    """Files to remove."""

    def carry_out(self, say: Say, dry: bool) -> None:
        """Write and remove files where they differ; `say` each change, made or (`dry`) wanted."""
        for path, text in self.texts.items():
            target = f"{self.root}{path}"
            if _text(target) == text:
                continue
            say(f"{'replace' if os.path.lexists(target) else 'make'} {target}")
            if not dry:
                files.remove_staged(*os.path.split(target))
                files.write(target, text.encode())
        for path in self.gone:
            say(f"remove {self.root}{path}")
            if not dry:
                files.remove_staged(*os.path.split(f"{self.root}{path}"))
                files.unlink(f"{self.root}{path}")
                point(f"removed {path}")

    def commands(self) -> List[Command]:
        """Return the commands that tell systemd, on this machine only; cron looks by itself."""
        reload = Command("root", ("systemctl", "daemon-reload"))
        if self.root or not {TIMER, SERVICE} & {*self.texts, *self.gone}:
            return []
        if self.gone:
            return [Command("root", ("systemctl", "stop", f"{NAMED}.timer")), reload]
        return [reload, Command("root", ("systemctl", "enable", "--now", f"{NAMED}.timer"))]


def look(place: FrontEnd, root: str, wanted: bool, uninstall: bool) -> Timer:
    """Return the wanted changes, none if no timer is `wanted` and none is there; raise CannotInstall."""
    root = os.path.abspath(root) if root else ""
    if wanted and uninstall:
        raise CannotInstall("argument --detach-timer: not allowed with argument --uninstall")
    gone = tuple(path for path in PATHS if os.path.lexists(f"{root}{path}")) if uninstall else ()
    found = Timer(root, _texts(place, root) if wanted else {}, gone)
    for directory in {os.path.dirname(f"{root}{path}") for path in (*found.texts, *gone)}:
        if not os.access(directory, os.W_OK | os.X_OK):
            raise CannotInstall(
                f"{directory}, where the timer of `{NAME} detach --due` belongs, is not writable: "
                f"run this as root"
            )
    return found


def is_there(root: str) -> bool:
    return any(os.path.lexists(f"{root}{path}") for path in PATHS)


def publishes(root: str) -> bool:
    """Return whether there is a timer that publishes; one of an earlier version does not."""
    return any("publish --due" in (_text(f"{root}{path}") or "") for path in (SERVICE, f"{CRON}/{NAMED}"))


def is_stopped(root: str) -> bool:
    """Return True if the timer is one of systemd's, of this machine, and systemd says it is not active."""
    if root or not os.path.lexists(TIMER) or not os.path.isdir(RUNS):
        return False
    try:
        return run(["systemctl", "show", "--property=ActiveState", f"{NAMED}.timer"]).strip() != ACTIVE
    except SemisharedError:
        return False


def _texts(place: FrontEnd, root: str) -> Dict[str, str]:
    remotes = place.remotes[len(root) :] if root and place.remotes.startswith(f"{root}/") else place.remotes
    command, user = f"{remotes}/lib/{NAME}/{NAME}", administrator(place)
    if os.path.isdir(f"{root}{UNITS}" if root else RUNS):
        return units(command, user)
    if os.path.isdir(f"{root}{CRON}"):
        return crontab(command, user)
    raise CannotInstall(
        f"there is neither systemd nor {root}{CRON} here: have `{command} detach --due` started "
        f"some other way"
    )


def _text(path: str) -> Optional[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None
