# SPDX-License-Identifier: Apache-2.0
"""install.sh: put semishared into OpenNebula, or take it out. All is looked at before a file is changed."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from contextlib import contextmanager
from typing import Iterator, NoReturn, Optional

if __package__ in (None, ""):
    sys.path[0:0] = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]

from semishared import NAME
from semishared.errors import CannotInstall, SemisharedError
from semishared.install import edits, examine, in_use, manuals, next_steps, rotation, timer
from semishared.install.front_end import FrontEnd, check_rights, check_version, locate
from semishared.install.shipped import CONF
from semishared.install.tree import PARTS, PROBES, STAGE, Tree
from semishared.opennebula.report import drop_output, printable
from semishared.tools import beneath
from semishared.tools.effects import point

DESCRIPTION = """Puts semishared into OpenNebula's front-end: the drivers below remotes/, and what oned.conf
and vmm_execrc must say.
A second run changes nothing. It ends by saying the three commands that come next."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            message = f"unknown argument '{message.partition(': ')[2]}'"
        message = message.replace("expected one argument", "needs a value").replace(
            "argument --remotes: needs a value", "--remotes needs a directory"
        )
        print(f"install.sh: {printable(message)}; --help shows all", file=sys.stderr)
        sys.exit(1)


def _named(text: str) -> str:
    """Return the value of an option; raise if it is empty, as from an unset variable: that is no place."""
    if not text:
        raise argparse.ArgumentTypeError("needs a value")
    return text


def parser() -> argparse.ArgumentParser:
    """Return the parser of install.sh's options."""
    top = _Parser(prog="install.sh", description=DESCRIPTION, allow_abbrev=False)
    mode = top.add_mutually_exclusive_group()

    def flag(name: str, text: str, to: argparse._ActionsContainer = top) -> None:
        to.add_argument(name, action="store_true", help=text)

    def value(name: str, metavar: str, text: str) -> None:
        top.add_argument(name, metavar=metavar, type=_named, help=text)

    flag("--uninstall", "take semishared out again: files, words, settings", mode)
    flag("--apply", "also sync the hosts, restart oned and create the datastores", mode)
    flag("--timers", "also make timers (systemd, or cron): detach, publish, stage, base verify, gc, metrics")
    flag("--detach-timer", "only that of `semishared detach --due` and `publish --due`")
    flag("--dry-run", "say what would change, change nothing")
    flag("--diff", "the same, with the changes of configuration files as a diff")
    flag("--yes", "do not ask (without a terminal nothing is asked anyway)")
    flag("--force", "also while VMs have disks of ours: uninstall, or install an older version")
    value("--hosts", "A,B", "look first if these hosts have what they need")
    value("--remotes", "DIR", "default: $ONE_LOCATION/var/remotes or /var/lib/one/remotes")
    value("--etc", "DIR", "where oned.conf is (default: $ONE_LOCATION/etc or /etc/one)")
    value("--root", "DIR", "an OpenNebula below this directory")
    flag("--no-config", "edit no configuration, only put the files in place")
    return top


def main(argv: list[str]) -> int:
    """Carry out install.sh; one line on stderr and 1 if it fails."""
    os.umask(0o022)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda caught, _frame: sys.exit(128 + caught))
    try:
        try:
            return run(parser().parse_args(argv))
        finally:
            sys.stdout.flush()
    except SemisharedError as e:
        said = e.detail if isinstance(e, CannotInstall) else e.line()
        print(f"install.sh: {printable(said)}", file=sys.stderr)
        return 1
    except OSError as e:
        what = f"{e.strerror}: {e.filename}" if e.filename else e.strerror or str(e)
        print(f"install.sh: {printable(what)}; run it again when that is mended", file=sys.stderr)
        drop_output()
        return 1
    except KeyboardInterrupt:
        print("install.sh: interrupted; run it again to end what it began", file=sys.stderr)
        return 130


def run(options: argparse.Namespace) -> int:
    """Look at everything, then change it."""
    checkout = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    place = locate(options.remotes, options.etc, options.root or "", not options.no_config, os.environ)
    dry = options.dry_run or options.diff
    warnings = [] if options.uninstall else check_version(place.version())
    files = look(place, checkout, options.uninstall)
    wanted = tuple(timer.ROWS) if options.timers else (timer.DETACH,) if options.detach_timer else ()
    timed = timer.look(place, options.root or "", wanted, options.uninstall)
    pages = manuals.look(place, checkout, options.root or "", options.uninstall)
    rotated = rotation.look(place, options.root or "", options.uninstall)
    timed = timed._replace(texts={**timed.texts, **rotated.texts}, gone=(*timed.gone, *rotated.gone))
    for item in files:
        warnings += item.changed.warnings
    if options.uninstall:
        warnings += in_use.left(place) if not options.root else []
    else:
        warnings += check_machines(options.hosts, place)
    # An OpenNebula below another directory is not the one that would be asked.
    why_not = ""
    if not options.root:
        why_not = in_use.why_not(place, options.uninstall, place.etc is not None or options.no_config)
    if why_not and not dry and not options.force:
        raise CannotInstall(f"{why_not}; --force does it all the same")
    warnings += [why_not] if why_not else []
    if not dry:
        check_rights(place, written(place, files))
    for warning in warnings:
        print(f"install.sh: warning: {printable(warning)}", file=sys.stderr)
    if not dry and not options.yes and not agreed(place, files, timed, options.uninstall):
        return 1
    with staged(place, checkout, files, dry) as tree:
        changed = change(tree, files, timed, pages, options, dry)
        kept = tree.is_changed()
    todo = [*next_steps.commands(place, options.uninstall), *timed.commands()]
    told(place, options, todo if changed else [], kept, dry)
    if options.apply and not dry:
        next_steps.carry_out(todo)
    return 0


def look(place: FrontEnd, checkout: str, uninstall: bool) -> list[edits.Edited]:
    """Return the wanted configuration files."""
    if place.etc is None:
        return []
    there = os.listdir(f"{checkout}/vmm") if os.path.isdir(f"{checkout}/vmm") else []
    own = [name for name in there if name not in edits.NO_ACTIONS]
    return edits.to_uninstall(place, own) if uninstall else edits.to_install(place, own)


def check_machines(hosts: Optional[str], place: FrontEnd) -> list[str]:
    """Return warnings; raise CannotInstall if a machine lacks what nothing works without."""
    found = [examine.on_front_end()]
    if hosts:
        user = next_steps.change_user(next_steps.administrator(place))
        found += examine.on_hosts([host for host in hosts.split(",") if host], user)
    errors = [item.line() for item in found if item.needed]
    if errors:
        raise CannotInstall("; ".join(errors))
    return [item.line() for item in found if item.line()]


def written(place: FrontEnd, files: list[edits.Edited]) -> list[str]:
    """Return the directories that are written to."""
    parts = (os.path.dirname(f"{place.remotes}/{part}") for part in (*PARTS, *PROBES, CONF))
    edited = (os.path.dirname(os.path.realpath(item.path)) for item in files if item.differs)
    return [place.remotes, *filter(os.path.isdir, parts), *edited]


def agreed(place: FrontEnd, files: list[edits.Edited], timed: timer.Timer, uninstall: bool) -> bool:
    """Ask the administrator at a terminal; without a terminal go on. Ctrl-D is a no."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    print(f"semishared {'leaves' if uninstall else 'goes into'} {place.remotes}")
    for item in files:
        for change in item.changed.changes:
            print(f"  {item.path}: {change}")
    for path in (*timed.texts, *timed.gone):
        print(f"  {timed.root}{path}")
    try:
        return input("Go on? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


@contextmanager
def staged(place: FrontEnd, checkout: str, files: list[edits.Edited], dry: bool) -> Iterator[Tree]:
    """Yield the parts, staged beside their place; one installer at a time, and no rest of a killed one."""
    lock = os.open(place.remotes, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not dry:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CannotInstall(f"another install.sh is at work in {place.remotes}") from None
            for name in os.listdir(place.remotes):
                if name.startswith(STAGE):
                    path = f"{place.remotes}/{name}"
                    os.unlink(path) if os.path.islink(path) else shutil.rmtree(path)
        stage = tempfile.mkdtemp(prefix=STAGE, dir=None if dry else place.remotes)
        # By descriptor: oneadmin owns remotes/ and may put another directory, or a link, in its place.
        opened = beneath.open_directory(os.path.dirname(stage), os.path.basename(stage))
        try:
            if os.stat(opened).st_uid != os.geteuid():
                raise CannotInstall(f"{stage} was exchanged")
            point("staging")
            yield Tree(checkout, place, beneath.path_of(opened), remote_scripts(files))
        finally:
            os.close(opened)
            shutil.rmtree(stage, ignore_errors=True)
    finally:
        os.close(lock)


def remote_scripts(files: list[edits.Edited]) -> str:
    """Return where hosts have remotes/, '' for OpenNebula's default."""
    found = [edits.scripts_dir(item.old, item.path) for item in files if item.path.endswith("oned.conf")]
    return found[0] if found and found[0] != edits.SCRIPTS_DIR else ""


def change(
    tree: Tree,
    files: list[edits.Edited],
    timed: timer.Timer,
    pages: manuals.Manuals,
    options: argparse.Namespace,
    dry: bool,
) -> bool:
    """Change everything, drivers before the configuration, or in reverse; tell if anything changed."""
    count = 0

    def say(text: str) -> None:
        nonlocal count
        count += 1
        print(f"{'would ' if dry else ''}{text}", flush=True)

    def configuration() -> None:
        for item in files:
            if not item.differs:
                continue
            say(f"edit {item.path}")
            for change in item.changed.changes:
                print(f"  {change}")
            if options.diff:
                print(item.diff(), end="")
            if not dry:
                backup = edits.write(item, with_backup=not options.uninstall)
                if backup:
                    print(f"  as it was: {backup}")

    if options.uninstall:
        timed.carry_out(say, dry)
        pages.carry_out(say, dry)
        configuration()
        if not dry:
            for item in files:
                for backup in edits.forget_backups(item):
                    print(f"kept {backup}")
        tree.uninstall(say, dry)
    else:
        tree.build()
        tree.install(say, dry)
        configuration()
        pages.carry_out(say, dry)
        timed.carry_out(say, dry)
    return count > 0


def told(
    place: FrontEnd, options: argparse.Namespace, todo: list[next_steps.Command], kept: bool, dry: bool
) -> None:
    """Print the result and the next commands: `todo`, empty if nothing changed."""
    if kept:
        print(f"kept {place.remotes}/{CONF}: it was changed (the defaults: {CONF} of this checkout)")
    if place.etc is None and not options.no_config:
        print("no oned.conf was found beside this remotes directory, and none was edited (--etc DIR)")
    if not todo:
        print(f"nothing to do in {place.remotes}{f' and {place.etc}' if place.etc else ''}")
    if dry or not todo or options.apply:
        return
    print("done; next, in this order:")
    for number, command in enumerate(todo, 1):
        print(f"  {number}. {command.line()}")
    package, admin = f"{place.remotes}/lib/{NAME}", next_steps.administrator(place)
    if options.uninstall:
        hook = f"onehook list, onehook delete ID of {next_steps.HOOK}"
        print(f"if hosts that fail were left to semishared: as {admin}: {hook}")
        return
    print(f"the operator's command: {package}/{NAME}")
    print(
        "to have VMs of a host that fails come up elsewhere by themselves, when it can be fenced "
        "(docs/how-to/dead-host.md):"
    )
    create = next_steps.Command(admin, ("onehook", "create", f"{package}/{next_steps.HOOK_FILE}"))
    print(f"  {create.line()}")
    if not timer.is_there(options.root or ""):
        print(
            "to have bases verified, leftovers removed, images staged, disks let go of their images' stores, "
            "and Sunstone and Prometheus told, all by timers (docs/how-to/timers.md):\n  install.sh --timers"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
