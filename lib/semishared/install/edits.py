# SPDX-License-Identifier: Apache-2.0
"""Edits of oned.conf and vmm_execrc on disk: what has to change, a backup first, each by one rename."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import time
from typing import Callable, Optional, Sequence

from .. import NAME
from ..errors import BadConfiguration, CannotInstall
from ..named import NamedTuple
from ..tools.effects import point
from ..tools.files import published, remove_staged
from . import configuration as plan
from .configuration import BEGIN, BLOCK, END, Changed
from .front_end import FrontEnd
from .oned_conf import Edit, apply, parse

LIVE = "LIVE_DISK_SNAPSHOTS"
ASSIGNMENT = re.compile(
    rf"""^[ \t]*(?:export[ \t]+)?{LIVE}="""
    r"""(?P<value>"(?:[^"\\]|\\.)*"|'[^']*'|[^\s"'#;&|$`]*)(?P<rest>[^\n]*)""",
    re.MULTILINE | re.DOTALL,
)


def configure_execrc(text: str, names: Sequence[str], path: str = "vmm_execrc") -> Changed:
    """Return vmm_execrc with NAME-semishared in its list of live disk snapshots for each VM_MAD of `names`.

    Without that, disks of running VMs have no snapshots. Text in, text out.
    """
    wanted = [f"{name}-{NAME}" for name in names]
    match = _assignment(text, path)
    if match is None:
        new = f'{text}\n{BEGIN}\n{LIVE}="{" ".join(wanted)}"\n{END}\n'
        return Changed(new, (f"{LIVE}: {' '.join(wanted)}",))
    value, quote = _unquoted(match.group("value"))
    missing = [word for word in wanted if word not in value.split()]
    if not missing:
        return Changed(text, ())
    new = " ".join([value, *missing] if value else missing)
    return Changed(_replaced(text, match, f"{quote}{new}{quote}"), (f"{LIVE}: {' '.join(missing)}",))


def unconfigure_execrc(text: str, path: str = "vmm_execrc") -> Changed:
    """Return vmm_execrc without anything of semishared."""
    without = BLOCK.sub("", text)
    match = _assignment(without, path)
    if match is not None:
        value, quote = _unquoted(match.group("value"))
        words = re.findall(r"(\s*)(\S+)", value)
        end = value[len(value.rstrip()) :]
        # One blank came with each word.
        kept = (blank[:-1] if word.endswith(f"-{NAME}") else blank + word for blank, word in words)
        new = "".join(kept) + end
        without = _replaced(without, match, f"{quote}{new}{quote}") if new != value else without
    return Changed(without, (f"{LIVE}: {NAME} out",) if without != text else ())


def _replaced(text: str, match: re.Match[str], value: str) -> str:
    return apply(text, [Edit(match.start("value"), match.end("value"), value)])


def _assignment(text: str, path: str) -> Optional[re.Match[str]]:
    """Return the last assignment of the list, which is in force; raise BadConfiguration if unreadable."""
    found = None
    for match in ASSIGNMENT.finditer(text):
        rest = match.group("rest").strip()
        if (rest and not rest.startswith("#")) or "\\" in match.group("value") or "$" in match.group("value"):
            line = text.count("\n", 0, match.start()) + 1
            raise BadConfiguration(f"{path} line {line}: {LIVE} is no plain list in quotes")
        found = match
    return found


def _unquoted(value: str) -> tuple[str, str]:
    """Return the text of a shell value, and the quotes it needs with blanks in it."""
    return (value[1:-1], value[0]) if value[:1] in ('"', "'") and value else (value, '"')


SCRIPTS_DIR = "/var/tmp/one"
"""The hosts' remotes/ by default, without SCRIPTS_REMOTE_DIR in oned.conf."""
BACKUP = f".{NAME}-"
"""Stands between the name of a file and the time of its backup."""


class Edited(NamedTuple):
    """A file's present and wanted text."""

    path: str
    old: str
    changed: Changed

    @property
    def differs(self) -> bool:
        return self.old != self.changed.text

    def diff(self) -> str:
        texts = self.old.splitlines(True), self.changed.text.splitlines(True)
        lines = difflib.unified_diff(*texts, self.path, f"{self.path} (new)")
        cut = "\n\\ no newline at the end of the file\n"
        return "".join(line if line.endswith("\n") else line + cut for line in lines)


def read(path: str) -> str:
    """Return a file's text, every byte of it; raise CannotInstall."""
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        raise CannotInstall(f"there is no {path}") from None
    except OSError as e:
        raise CannotInstall(
            f"cannot read {path}: {e.strerror}; run this as root or as the user of OpenNebula"
        ) from None


def scripts_dir(text: str, path: str) -> str:
    """Return the hosts' directory to which `onehost sync` copies remotes/."""
    return _value(text, path, "SCRIPTS_REMOTE_DIR").rstrip("/") or SCRIPTS_DIR


def hostname(text: str, path: str) -> str:
    """Return oned's name of the front-end as a target of copies, '' for its own name."""
    return _value(text, path, "HOSTNAME")


MOVES = {"DS_MIGRATE": "YES", "DS_LIVE_MIGRATE": "NO", "DS_MIGRATE_SNAP": "NO"}
"""What a driver says of moves to a system datastore -> oned's word where it says nothing (Datastore.cc)."""


def moves(text: str, path: str) -> dict[str, str]:
    """Return what oned.conf says of moves to system datastores of ours, {} without our driver."""
    for attribute in parse(text, path):
        if attribute.name == "TM_MAD_CONF" and attribute.text("NAME") == NAME:
            return {key: attribute.text(key).upper() or word for key, word in MOVES.items()}
    return {}


def _value(text: str, path: str, name: str) -> str:
    found = [item.value.text for item in parse(text, path) if item.name == name]
    return found[-1] if found else ""


NO_ACTIONS = ("virtiofsd", "virtiofsd_read_only", "with_records")
"""Executables of vmm/ that are no actions of oned."""


def to_install(place: FrontEnd, own_actions: Sequence[str]) -> list[Edited]:
    """Return the changes of an installation: vmm_execrc, then oned.conf."""
    text = read(place.oned_conf)
    names = plan.hypervisor_names(text, place.oned_conf)
    conf = Edited(place.oned_conf, text, plan.configure(text, own_actions, place.oned_conf))
    rc = read(place.execrc)
    return [Edited(place.execrc, rc, configure_execrc(rc, names, place.execrc)), conf]


def to_uninstall(place: FrontEnd, own_actions: Sequence[str]) -> list[Edited]:
    """Return the changes of a removal: oned.conf, then vmm_execrc.

    A file that is still our edit of a backup becomes that backup, unless an upgrade made it, with our lines
    in it.
    """
    text = read(place.oned_conf)
    names = plan.hypervisor_names(text, place.oned_conf)
    conf = _undone(place.oned_conf, text, plan.unconfigure, lambda old: plan.configure(old, own_actions))
    rc = read(place.execrc)
    live = _undone(place.execrc, rc, unconfigure_execrc, lambda old: configure_execrc(old, names))
    return [conf, live]


def _undone(
    path: str, text: str, undo: Callable[[str, str], Changed], redo: Callable[[str], Changed]
) -> Edited:
    changed = undo(text, path)
    for backup in backups(path):
        old = read(backup)
        try:
            if old != text and undo(old, path).text == old and redo(old).text == text:
                return Edited(path, text, changed._replace(text=old))
        except BadConfiguration:
            continue
    return Edited(path, text, changed)


def backups(path: str) -> list[str]:
    """Return the backups of a file, oldest first."""
    directory, name = os.path.split(os.path.realpath(path))
    names = sorted(entry for entry in os.listdir(directory) if entry.startswith(f"{name}{BACKUP}"))
    return [f"{directory}/{entry}" for entry in names]


def write(edited: Edited, with_backup: bool) -> str:
    """Replace the file by one rename; owner, mode, access list and label stay; return the backup's path.

    `edited.path` may be a link: its target is edited.
    """
    path = os.path.realpath(edited.path)
    remove_staged(*os.path.split(path))
    backup = next((there for there in backups(path) if read(there) == edited.old), "") if with_backup else ""
    if with_backup and not backup:
        backup = f"{path}{BACKUP}{time.strftime('%Y%m%d-%H%M%S')}"
        _write_like(path, backup, edited.old)
        point(f"backed up {os.path.basename(path)}")
    if read(path) != edited.old:
        raise CannotInstall(f"{path} is being changed by somebody else")
    _write_like(path, path, edited.changed.text)
    return backup


def forget_backups(edited: Edited) -> list[str]:
    """Remove the backups with no other text than the file has now; return those that stay."""
    kept = []
    for backup in backups(edited.path):
        if read(backup) == edited.changed.text:
            os.unlink(backup)
            point(f"removed {os.path.basename(backup)}")
        else:
            kept.append(backup)
    return kept


def _write_like(model: str, path: str, text: str) -> None:
    status = os.stat(model)
    with published(path) as staged:
        with open(staged, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(text.encode("utf-8", "surrogateescape"))
        if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(staged, status.st_uid, status.st_gid)
        shutil.copystat(model, staged)
        os.utime(staged)
