# SPDX-License-Identifier: Apache-2.0
"""The files below remotes/: staged beside, compared, exchanged part by part, each old or new, never half.

The package comes first and goes last: the actions need it.
"""

from __future__ import annotations

import compileall
import ctypes
import filecmp
import hashlib
import os
import re
import shutil
import stat
from contextlib import contextmanager
from typing import Callable, Iterator, Optional

from .. import NAME
from ..errors import CannotInstall, UnexpectedLink
from ..tools import beneath
from ..tools.effects import point
from ..tools.files import fsync
from ..wire.messages import BUILD
from . import next_steps, preflight, shipped
from .commit import COMMIT, commit_of
from .front_end import FrontEnd
from .shipped import CONF, NOTE, SCRIPTS

STAGE = f".{NAME}-install."
PARTS = (f"lib/{NAME}", f"tm/{NAME}", f"datastore/{NAME}", f"vmm/{NAME}")
PROBES = (f"im/kvm-probes.d/host/system/{NAME}", f"im/qemu-probes.d/host/system/{NAME}")
"""Where the monitoring of hosts looks for probes, per hypervisor."""
ACTION = re.compile(r"[A-Za-z0-9._-]+\Z")
BUILD_DIGITS = 12
Say = Callable[[str], None]


class Tree:
    """The parts of `checkout` for `place`, staged in `stage`, a directory on the same file system."""

    def __init__(self, checkout: str, place: FrontEnd, stage: str, scripts_dir: str) -> None:
        self.checkout = checkout
        self.place = place
        self.stage = stage
        self._scripts_dir = scripts_dir
        self._old = f"{stage}/old"
        os.makedirs(self._old)

    def build(self) -> None:
        """Stage everything; raise CannotInstall if the checkout is incomplete or no Python."""
        try:
            for part in PARTS:
                kind = part.split("/")[0]
                source = f"{self.checkout}/{part if kind == 'lib' else kind}"
                shutil.copytree(source, f"{self.stage}/{part}", ignore=shutil.ignore_patterns("__pycache__"))
            # The `semishared` command is in the package, and is exchanged and removed with it.
            command = f"{self.stage}/lib/{NAME}/{NAME}"
            shutil.copy2(f"{self.checkout}/bin/{NAME}", command)
            for probe in PROBES:
                os.makedirs(os.path.dirname(f"{self.stage}/{probe}"))
                shutil.copy2(f"{self.checkout}/im/{NAME}", f"{self.stage}/{probe}")
            os.mkdir(f"{self.stage}/etc")
            self._stage_conf()
        except (OSError, shutil.Error) as e:
            raise CannotInstall(f"cannot copy the checkout: {e}") from None
        self._forward()
        for path in _below(self.stage):
            if path.startswith(f"{self.stage}/etc/"):
                continue
            is_data = path.startswith(f"{self.stage}/lib/") and path != command
            os.chmod(path, 0o644 if is_data and not os.path.isdir(path) else 0o755)
        package = f"{self.stage}/lib/{NAME}"
        build = preflight.digest(package)[:BUILD_DIGITS]
        with open(f"{package}/{BUILD}", "w", encoding="ascii") as file:
            file.write(f"{build}\n")
        commit = commit_of(self.checkout)
        if commit:
            # Not in what BUILD is the hash of: commits with the same package understand each other.
            with open(f"{package}/{COMMIT}", "w", encoding="ascii") as file:
                file.write(f"{commit}\n")
        with open(f"{package}/{next_steps.HOOK_FILE}", "w", encoding="utf-8") as file:
            file.write(next_steps.hook(f"{self.place.remotes}/lib/{NAME}/{NAME}"))

        self._stage_pages(package)

    def _stage_pages(self, package: str) -> None:
        """Have the pages that lines of ours name beside the command, which prints them (`explain`).

        They are not in what BUILD is the hash of: a host with an older page is not outdated. A package of the
        distribution has them elsewhere, and no docs/ here.
        """
        pages = f"{self.checkout}/docs"
        try:
            for folder, _, names in os.walk(pages):
                target = f"{package}/docs{folder[len(pages) :]}"
                for name in names:
                    if name.endswith(".md") or folder.endswith("/schemas"):
                        os.makedirs(target, exist_ok=True)
                        shutil.copyfile(f"{folder}/{name}", f"{target}/{name}")
                        os.chmod(f"{target}/{name}", 0o644)
        except OSError as e:
            raise CannotInstall(f"cannot copy the checkout: {e}") from None

    def _stage_conf(self) -> None:
        text = self._shipped()
        if self._scripts_dir:
            text = SCRIPTS.sub(f"scripts_dir = {self._scripts_dir}", text)
        with open(f"{self.stage}/{NOTE}", "w", encoding="ascii") as file:
            file.write(f"{shipped.digest(text)}\n")
        conf, mode = f"{self.place.remotes}/{CONF}", 0o644
        installed = shipped.read(conf)
        if installed:
            text, mode = shipped.successor(text, installed), os.stat(conf).st_mode & 0o666
        with open(
            f"{self.stage}/{CONF}", "w", encoding="utf-8", errors="surrogateescape", newline=""
        ) as file:
            file.write(text)
        os.chmod(f"{self.stage}/{CONF}", mode)

    def _forward(self) -> None:
        """Make the scripts that hand over to OpenNebula's own ones, for the actions of its version."""
        ours = f"{self.stage}/vmm/{NAME}"
        stock = f"{self.place.remotes}/vmm/kvm"
        for action in filter(ACTION.match, sorted(os.listdir(stock))):
            if is_action(f"{stock}/{action}") and not os.path.exists(f"{ours}/{action}"):
                with open(f"{ours}/{action}", "w", encoding="utf-8") as file:
                    file.write(forwarder(action))

    def install(self, say: Say, dry: bool) -> None:
        """Install every part; `say` each change, made or (`dry`) wanted."""
        for part in PARTS:
            self._swap(part, say, dry)
        remotes = self.place.remotes
        probes = [probe for probe in PROBES if os.path.isdir(os.path.dirname(f"{remotes}/{probe}"))]
        todo = [probe for probe in probes if not _same_file(f"{self.stage}/{probe}", f"{remotes}/{probe}")]
        for part in todo:
            say(f"make {remotes}/{part}")
            if not dry:
                self._put(part)
        self._install_conf(say, dry)

    def _install_conf(self, say: Say, dry: bool) -> None:
        """Make the configuration, or replace one that is as an earlier version has shipped it.

        After the package: a key that this one is the first to know stops every action of an older one. The
        note comes last, so that a run after one that was killed still knows what was shipped before.
        """
        conf = f"{self.place.remotes}/{CONF}"
        is_there = os.path.lexists(conf)
        if not is_there or self._is_outdated(conf):
            say(f"{'replace' if is_there else 'make'} {conf}")
            if not dry:
                self._put(CONF)
        if not dry and shipped.noted(self.place.remotes) != shipped.read(f"{self.stage}/{NOTE}").strip():
            self._put(NOTE)

    def _is_outdated(self, conf: str) -> bool:
        """Tell whether the installed configuration is an earlier one of ours that nothing was changed in."""
        if self._is_as_shipped(conf):
            return False
        return shipped.is_untouched(shipped.read(conf), shipped.noted(self.place.remotes))

    def uninstall(self, say: Say, dry: bool) -> None:
        """Remove every part, the package last; a changed configuration stays."""
        conf = f"{self.place.remotes}/{CONF}"
        is_ours = self._is_as_shipped(conf) or self._is_outdated(conf)
        parts = [*PROBES, *reversed(PARTS), *([CONF] if is_ours else []), NOTE]
        for part in parts:
            path = f"{self.place.remotes}/{part}"
            if not os.path.lexists(path):
                continue
            say(f"remove {path}")
            if dry:
                continue
            gone = f"{self._old}/{part.replace('/', '-')}"
            with self._parent(part) as parent:
                os.rename(f"{parent}/{os.path.basename(part)}", gone)
            point(f"removed {part}")
        library = f"{self.place.remotes}/lib"
        if not dry and os.path.isdir(library) and not os.listdir(library):
            os.rmdir(library)

    def is_changed(self) -> bool:
        """Tell whether the installed semishared.conf has an administrator's changes."""
        conf = f"{self.place.remotes}/{CONF}"
        return os.path.lexists(conf) and not self._is_as_shipped(conf) and not self._is_outdated(conf)

    def _is_as_shipped(self, conf: str) -> bool:
        if not os.path.isfile(conf):
            return False
        with open(conf, encoding="utf-8", errors="replace") as file:
            installed = file.read()
        return SCRIPTS.sub("", installed) == SCRIPTS.sub("", self._shipped())

    def _shipped(self) -> str:
        with open(f"{self.checkout}/{CONF}", encoding="utf-8") as file:
            return file.read()

    def _swap(self, part: str, say: Say, dry: bool) -> None:
        new, old = f"{self.stage}/{part}", f"{self.place.remotes}/{part}"
        is_there = os.path.lexists(old)
        differing: list[str] = []
        if is_there and os.path.isdir(old) and not os.path.islink(old):
            differing = _differing(old, new, self._owner)
            if not differing:
                return
        if not dry:
            self._compile(part)
            self._give_away(new)
        say(f"{'replace' if is_there else 'make'} {old}")
        if dry:
            for name in differing:
                print(f"  {old}/{name} differs")
            return
        # Durable before it is visible: a machine that loses power has the old part or the new one.
        for path in _below(new):
            if os.path.isfile(path):
                fsync(path)
        with self._parent(part) as parent:
            old = f"{parent}/{os.path.basename(part)}"
            if is_there and not _exchange(new, old):
                os.rename(old, f"{self._old}/{part.replace('/', '-')}")
                point(f"away {part}")
            if os.path.lexists(new) and not os.path.lexists(old):
                os.rename(new, old)
            fsync(parent)
        point(f"swapped {part}")

    def _compile(self, part: str) -> None:
        """Compile a package, which takes as long as all the rest; raise CannotInstall if it is no Python."""
        # Saves every action 5 ms; rsync keeps the times that make byte code valid on the hosts too.
        package, at = f"{self.stage}/{part}", f"{self.place.remotes}/{part}"
        if part == PARTS[0] and not compileall.compile_dir(package, quiet=2, ddir=at):
            raise CannotInstall(f"this python cannot compile the package in {self.checkout}/lib")

    @property
    def _owner(self) -> Optional[tuple[int, int]]:
        """Return the owner of all files, None for this user: only root can give files away."""
        return self.place.owner if os.geteuid() == 0 else None

    def _give_away(self, path: str) -> None:
        owner = self._owner
        if owner is None:
            return
        # From below: in a directory that is not root's any more, its owner decides where the next path leads.
        for below in reversed([path, *list(_below(path))[1:]]):
            os.chown(below, *owner, follow_symlinks=False)

    def _put(self, part: str) -> None:
        self._give_away(f"{self.stage}/{part}")
        fsync(f"{self.stage}/{part}")
        with self._parent(part) as parent:
            os.replace(f"{self.stage}/{part}", f"{parent}/{os.path.basename(part)}")
            fsync(parent)
        point(f"put {part}")

    @contextmanager
    def _parent(self, part: str) -> Iterator[str]:
        """Yield a path to the directory of a part below remotes/, made if need be; raise CannotInstall if
        outside.

        remotes/ is oneadmin's, and we may be root: a link in it (OpenNebula has some, `qemu-probes.d`) is
        followed only to a place in it, also one that appears at this moment.
        """
        root = os.path.realpath(self.place.remotes)
        parent = os.path.realpath(f"{root}/{os.path.dirname(part)}")
        if not parent.startswith(f"{root}/"):
            raise CannotInstall(
                f"{self.place.remotes}/{os.path.dirname(part)} leads out of {self.place.remotes}, to {parent}"
            )
        is_new = not os.path.isdir(parent)
        try:
            fd = beneath.open_directory(root, parent[len(root) + 1 :], make=True, for_all=False)
        except UnexpectedLink as e:
            raise CannotInstall(e.detail) from None
        try:
            if is_new and os.geteuid() == 0:
                os.chown(beneath.path_of(fd), *self.place.owner)
            yield beneath.path_of(fd)
        finally:
            os.close(fd)


def is_action(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def forwarder(action: str) -> str:
    """Return the script that forwards `action` to the stock one beside us."""
    return f"""#!/bin/sh
# Made by semishared's install.sh: nothing of ours differs for this action.
exec "$(dirname -- "$0")/../kvm/{action}" "$@"
"""


def _exchange(new: str, old: str) -> bool:
    """Exchange two directories atomically, if this file system can; tell whether it could."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        return int(libc.renameat2(-100, os.fsencode(new), -100, os.fsencode(old), 2)) == 0
    except AttributeError:
        return False


def _below(directory: str) -> Iterator[str]:
    for folder, names, files in os.walk(directory):
        yield folder
        links = [name for name in names if os.path.islink(f"{folder}/{name}")]
        yield from (f"{folder}/{name}" for name in (*files, *links))


def _same_file(ours: str, there: str) -> bool:
    return is_action(there) and filecmp.cmp(ours, there, shallow=False)


def _described(directory: str, owner: Optional[tuple[int, int]] = None) -> dict[str, tuple[object, ...]]:
    """Return mode, owner (or `owner`, the wanted one) and content of every file below, without byte code."""
    found: dict[str, tuple[object, ...]] = {}
    for path in _below(directory):
        if "__pycache__" in path:
            continue
        status = os.lstat(path)
        content = b""
        if stat.S_ISLNK(status.st_mode):
            content = os.fsencode(os.readlink(path))
        elif stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                content = hashlib.sha256(file.read()).digest()
        whose = owner or (status.st_uid, status.st_gid)
        found[os.path.relpath(path, directory)] = (status.st_mode, *whose, content)
    return found


def _differing(old: str, new: str, owner: Optional[tuple[int, int]]) -> list[str]:
    there, ours = _described(old), _described(new, owner)
    return sorted(name for name in {*there, *ours} if there.get(name) != ours.get(name))
