# SPDX-License-Identifier: Apache-2.0
"""Timers: what semishared does by itself, as units of systemd, else files for cron (ROWS).

They are made on request, stay in an upgrade, and go with the rest. Each gives way to all else on the machine,
runs for a limited time, and not at the same moment in every cloud.
"""

from __future__ import annotations

import os
import re
from typing import Dict, List, Optional, Sequence, Tuple

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
METRICS = f"/var/lib/{NAME}-metrics"
"""The directory of metrics, which node_exporter reads (docs/how-to/metrics.md)."""


class Row(NamedTuple):
    """A timer."""

    what: str
    verbs: Tuple[str, ...]
    """Words of the command; but for the last, their failure is none of the timer's."""
    systemd: str
    """When, by systemd.timer(5)."""
    cron: str
    jitter_s: int
    """Seconds at most by which a run is put off, by chance."""
    budget_s: int
    """Seconds after which a run is ended; the next one goes on with what is left."""
    makes: str = ""
    """A directory below /var/lib that its user writes to."""

    @property
    def prefix(self) -> str:
        """Return the words by which cron limits it; systemd has settings for that."""
        return f"nice -n 19 ionice -c 3 timeout {self.budget_s} "


HOUR_S = 3600
DETACH = "detach"
ROWS: Dict[str, Row] = {
    DETACH: Row(
        "VMs of OpenNebula let go of their images' stores, and Sunstone shows where disks are",
        ("publish --due", "detach --due"),
        "OnActiveSec=2min\nOnUnitInactiveSec=2min",
        "*/2 * * * *",
        10,
        6 * HOUR_S,
    ),
    "stage": Row(
        "Images of OpenNebula come to hosts before VMs need them there",
        ("stage --due",),
        "OnActiveSec=10min\nOnUnitInactiveSec=10min",
        "*/10 * * * *",
        60,
        6 * HOUR_S,
    ),
    "verify": Row(
        "Bases of hosts are compared with their hashes",
        ("base verify --due",),
        "OnCalendar=daily",
        "5 0 * * *",
        4 * HOUR_S,
        6 * HOUR_S,
    ),
    "gc": Row(
        "What killed actions of semishared have left is removed",
        ("gc",),
        "OnCalendar=daily",
        "35 0 * * *",
        4 * HOUR_S,
        2 * HOUR_S,
    ),
    "metrics": Row(
        "Metrics of semishared for Prometheus",
        (f"metrics --output {METRICS}/{NAME}.prom",),
        "OnActiveSec=1min\nOnUnitInactiveSec=1min",
        "* * * * *",
        5,
        300,
        makes=METRICS,
    ),
}


def named(row: str) -> str:
    """Return the name of a timer for systemd and cron."""
    return f"{NAME}-{row}"


def paths(row: str) -> Tuple[str, ...]:
    """Return all files of a timer, the one that starts the rest first."""
    name = named(row)
    link = f"{UNITS}/timers.target.wants/{name}.timer"  # by which systemd starts it at boot
    return link, f"{UNITS}/{name}.timer", f"{UNITS}/{name}.service", f"{CRON}/{name}"


NAMED = named(DETACH)
"""The timer that publishes."""
ENABLED, TIMER, SERVICE, CRONTAB = paths(DETACH)
PATHS = tuple(path for row in ROWS for path in paths(row))
RUNS = "/run/systemd/system"
"""There while systemd is the machine's init (sd_booted(3))."""
ACTIVE = "ActiveState=active"
PLAIN = re.compile(r"[A-Za-z0-9_./-]+\Z")
"""Text with the same meaning for systemd, cron and a shell."""


def units(command: str, user: str, rows: Sequence[str] = (DETACH,)) -> Dict[str, str]:
    """Return the units of systemd by their paths; raise CannotInstall."""
    _check_plain(command, user)
    found = {}
    for name in rows:
        row, (_, timer, service, _) = ROWS[name], paths(name)
        what = f"[Unit]\nDescription={row.what}\n"
        # The minus sign: a host that does not answer is no failure of the unit.
        lines = [f"ExecStart=-{command} {words}" for words in row.verbs[:-1]]
        lines.append(f"ExecStart={command} {row.verbs[-1]}")
        lines += [f"TimeoutStartSec={row.budget_s}", "Nice=19", "IOSchedulingClass=idle"]
        if row.makes:
            lines += [f"StateDirectory={os.path.basename(row.makes)}", "StateDirectoryMode=0755"]
        found[service] = f"{what}After=opennebula.service\n\n[Service]\nType=oneshot\nUser={user}\n"
        found[service] += "".join(f"{line}\n" for line in lines)
        found[timer] = f"{what}\n[Timer]\n{row.systemd}\nRandomizedDelaySec={row.jitter_s}\n"
        found[timer] += "\n[Install]\nWantedBy=timers.target\n"
    return found


def crontab(command: str, user: str, rows: Sequence[str] = (DETACH,)) -> Dict[str, str]:
    """Return the files for cron by their paths; one run of each at a time. Raise CannotInstall."""
    _check_plain(command, user)
    found = {}
    for name in rows:
        row, path = ROWS[name], paths(name)[-1]
        # cron has no word for chance.
        wait = f"sleep $(shuf -n 1 -i 0-{row.jitter_s});"
        verbs = "; ".join(f"{command} {words}" for words in row.verbs)
        work = f"{row.prefix}flock -n {path} sh -c '{verbs}' >/dev/null"
        made = f"install -d -m 755 -o {user} {row.makes} && runuser -u {user} --"
        found[path] = f"{row.cron} {f'root {wait} {made}' if row.makes else f'{user} {wait}'} {work}\n"
    return found


def _check_plain(*words: str) -> None:
    for word in words:
        if not PLAIN.match(word):
            raise CannotInstall(
                f"no timer can name {word!r}: have `{NAME} detach --due` and the like started some other way"
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
        mine = {*self.texts, *self.gone}
        names = tuple(named(row) for row in ROWS if mine & {*paths(row)[1:3]})
        timers = tuple(f"{name}.timer" for name in names)
        if self.root or not names:
            return []
        if self.gone:
            services = tuple(f"{name}.service" for name in names)
            # systemd goes on to list a unit that has failed when its file is gone; it refuses the name of one
            # that it has not loaded, and takes a pattern for none.
            forget = Command("root", ("systemctl", "reset-failed", *(f"{name}.*" for name in names)))
            return [Command("root", ("systemctl", "stop", *timers, *services)), reload, forget]
        return [reload, Command("root", ("systemctl", "enable", "--now", *timers))]


def look(place: FrontEnd, root: str, wanted: Sequence[str], uninstall: bool) -> Timer:
    """Return the wanted changes, none if no timer is `wanted` (of ROWS) and none is there; raise
    CannotInstall.
    """
    root = os.path.abspath(root) if root else ""
    if wanted and uninstall:
        raise CannotInstall("argument --timers, --detach-timer: not allowed with argument --uninstall")
    gone = tuple(path for path in PATHS if os.path.lexists(f"{root}{path}")) if uninstall else ()
    found = Timer(root, _texts(place, root, wanted) if wanted else {}, gone)
    for directory in {os.path.dirname(f"{root}{path}") for path in (*found.texts, *gone)}:
        if not os.access(directory, os.W_OK | os.X_OK):
            raise CannotInstall(f"{directory}, where timers belong, is not writable: run this as root")
    return found


def is_there(root: str) -> bool:
    return any(os.path.lexists(f"{root}{path}") for path in PATHS)


def publishes(root: str) -> bool:
    """Return whether there is a timer that publishes; one of an earlier version does not."""
    return any("publish --due" in (_text(f"{root}{path}") or "") for path in (SERVICE, CRONTAB))


def is_stopped(root: str) -> bool:
    """Return True if the timer is one of systemd's, of this machine, and systemd says it is not active."""
    if root or not os.path.lexists(TIMER) or not os.path.isdir(RUNS):
        return False
    try:
        return run(["systemctl", "show", "--property=ActiveState", f"{NAMED}.timer"]).strip() != ACTIVE
    except SemisharedError:
        return False


def _texts(place: FrontEnd, root: str, rows: Sequence[str]) -> Dict[str, str]:
    remotes = place.remotes[len(root) :] if root and place.remotes.startswith(f"{root}/") else place.remotes
    command, user = f"{remotes}/lib/{NAME}/{NAME}", administrator(place)
    if os.path.isdir(f"{root}{UNITS}" if root else RUNS):
        return units(command, user, rows)
    if os.path.isdir(f"{root}{CRON}"):
        return crontab(command, user, rows)
    raise CannotInstall(
        f"there is neither systemd nor {root}{CRON} here: have `{command} {ROWS[rows[0]].verbs[-1]}` started "
        f"some other way"
    )


def _text(path: str) -> Optional[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None
