# SPDX-License-Identifier: Apache-2.0
"""The context ISO: volume CONTEXT with context.sh and the files the VM template names.

context.sh may contain a key (plan/share/client_keys.py), so no killed action may leave it behind. The
temporary directory's name names its writer (tools/owner.py); the next ISO or `semishared gc` removes it. The
ISO itself is read from a file whose name is removed already.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from contextlib import closing, contextmanager
from typing import Iterator

from ..errors import BadArguments, MissingImage, SourceUnavailable, ToolFailed, ToolMissing, of_system
from . import owner
from .effects import point
from .run import PATH, run, stream

TOOLS = (["xorriso", "-as", "mkisofs"], ["genisoimage", "-joliet-long"], ["mkisofs", "-joliet-long"])
"""xorriso first, as OpenNebula has it: names may be equal in their first 103 letters."""
NAME = re.compile(r"[^/\x00-\x1f]{1,200}\Z")
PREFIX = "semishared-context-"


def _split(argument: str) -> tuple[str, str]:
    """Return path and name in the ISO of a `path[:name]` argument; raise BadArguments."""
    if "://" in argument:
        from . import curl

        curl.escaped(argument)
        return argument, os.path.basename(argument.split("?")[0]) or "file"
    path, colon, name = argument.partition(":")
    name = name.strip("'") if colon else os.path.basename(path)
    if not path.startswith("/") or not NAME.match(name) or name in (".", ".."):
        raise BadArguments(f"not a file for the context: {argument!r}")
    return path, name


def remove_stale() -> None:
    """Remove what ended writers left in the directory for temporary files, which is local to this machine."""
    top = tempfile.gettempdir()
    try:
        names = os.listdir(top)
    except OSError:
        # The directory may be writable and not readable: skip it.
        return
    for name in names:
        # Any user may make such a name there: another user's directory stays.
        if name.startswith(PREFIX) and owner.is_gone(name, other_boots=True):
            shutil.rmtree(f"{top}/{name}", ignore_errors=True)


@contextmanager
def built(files: tuple[str, ...], more: bytes = b"", datastores: str = "") -> Iterator[str]:
    """Yield the path, in this process alone, of an ISO with `files`; append the secret `more` to context.sh.

    Files in a datastore (below `datastores`) are read without following a link, as a host may have put one
    there: raise UnexpectedLink.
    """
    pairs = [_split(argument) for argument in files]
    for tool in TOOLS:
        if shutil.which(tool[0], path=f"{os.environ.get('PATH', '')}:{PATH}"):
            break
    else:
        raise ToolMissing("none of genisoimage, mkisofs, xorriso is installed on the front-end")
    remove_stale()
    with tempfile.TemporaryDirectory(prefix=PREFIX, suffix=f".{owner.suffix()}") as directory:
        content, iso = f"{directory}/content", f"{directory}/context.iso"
        os.mkdir(content)
        _fill(content, pairs, more, datastores)
        point("content of the ISO written")
        run([*tool, "-quiet", "-o", iso, "-V", "CONTEXT", "-J", "-R", content])
        file = open(iso, "rb")
    with file:
        point("ISO written")
        yield f"/proc/self/fd/{file.fileno()}"


def _in_datastore(path: str, datastores: str) -> tuple[str, str]:
    """Return the datastore of a path, and the path below it; '' if it is in none."""
    path = os.path.normpath(path)
    if not datastores or not path.startswith(f"{datastores}/"):
        return "", ""
    number, _, below = path[len(datastores) + 1 :].partition("/")
    return f"{datastores}/{number}", below


def _download(url: str, target: str) -> None:
    """Fetch a URL into the new file `target`; raise SourceUnavailable, without a password in it."""
    from . import curl

    try:
        with open(target, "wb") as file, closing(stream(curl.argv(), stdin=curl.config(url))) as chunks:
            for chunk in chunks:
                file.write(chunk)
    except ToolFailed as e:
        raise SourceUnavailable(f"context file {curl.masked(url)}: {curl.reason(e.detail, url)}") from None


def _copy_tree(path: str, target: str) -> None:
    """Copy a directory as `cp -R` of OpenNebula's driver does: links stay links, also dead ones.

    Raise MissingImage for what an ISO cannot hold: a FIFO, a socket or a device.
    """
    for directory, folders, names in os.walk(path):
        for name in (*folders, *names):
            mode = os.lstat(f"{directory}/{name}").st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                raise MissingImage(
                    f"context file {directory}/{name} is a FIFO, a socket or a device, which no ISO holds"
                )
    try:
        shutil.copytree(path, target, symlinks=True, dirs_exist_ok=True)
    except shutil.Error as e:
        # One row for each file: (from, to, reason).
        which, _, why = e.args[0][0]
        raise MissingImage(f"context file {which}: {why}") from None


def _fill(content: str, pairs: list[tuple[str, str]], more: bytes, datastores: str) -> None:
    for path, name in pairs:
        if "://" in path:
            _download(path, f"{content}/{name}")
            continue
        try:
            root, below = _in_datastore(path, datastores)
            if root:
                from . import beneath

                with (
                    open(beneath.open_file(root, below), "rb") as source,
                    open(f"{content}/{name}", "wb") as target,
                ):
                    shutil.copyfileobj(source, target)
            elif os.path.isdir(path):
                _copy_tree(path, f"{content}/{name}")
            else:
                shutil.copyfile(path, f"{content}/{name}")
        except shutil.SpecialFileError:
            raise MissingImage(f"context file {path} is no regular file") from None
        except OSError as e:
            what = f"context file {path}, on its way to {content}: {e.strerror}"
            raise of_system(e, what, MissingImage) from None
    if more:
        with open(f"{content}/context.sh", "ab") as file:
            # In the guest too: Rock Ridge keeps modes.
            os.fchmod(file.fileno(), 0o600)
            file.write(more)
