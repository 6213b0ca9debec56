# SPDX-License-Identifier: Apache-2.0
"""Directories that existed before, given to guests as they are: registered below SAFE_DIRS.

As any share, such a one has in the root a record, which names the directory, and a tree: an empty directory
where the daemon mounts it in its own namespace (vmm/virtiofsd.py). So every check of a share relies only on
what root and the drivers' user have written, and another daemon would serve the empty tree. Nothing in the
directory is made, changed, counted or removed.
"""

from __future__ import annotations

import errno
import os
import re

from ..errors import (
    DataInTheWay,
    MissingImage,
    NotSupported,
    RestrictedPath,
    ShareRefused,
    StoreUnavailable,
    here,
)
from ..model.attributes import PATH
from ..model.disk import names as disk_names
from ..model.share import names as share_names
from ..model.share.share import Share, Tree
from ..model.share.steps import FoundDirectory
from ..tools import files
from ..tools.effects import point
from ..tools.hung_store import LIMIT_S, unless_it_hangs

NEVER = (
    "/boot",
    "/dev",
    "/etc",
    "/proc",
    "/root",
    "/run",
    "/sys",
    "/usr",
    "/var/lib/libvirt",
    "/var/lib/one",
    "/var/tmp",
)
"""Closed to guests, whatever SAFE_DIRS says.

oned itself puts /var/tmp into SAFE_DIRS, where hosts have its scripts.
"""
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def found(tree: Tree, path: str, safe: tuple[str, ...], others: tuple[str, ...] = ()) -> FoundDirectory:
    """Return the real path of a directory that the operator has allowed.

    Raise RestrictedPath, NotSupported, StoreUnavailable, and as `opened`. `others`: datastores, closed to
    guests, too. A path that is not below `safe` as written is not even looked at: it may hang, or be an
    automount.
    """
    if not any(_is_below(path, directory.rstrip("/") or "/") for directory in safe):
        raise RestrictedPath(f"{path} is below none of the datastore's SAFE_DIRS")
    there = unless_it_hangs(lambda: _found(tree, path, safe, others), None)
    if there is None:
        raise StoreUnavailable(f"{here(path)}, or a datastore there, hangs: no answer within {LIMIT_S:.0f} s")
    return there


def _found(tree: Tree, path: str, safe: tuple[str, ...], others: tuple[str, ...]) -> FoundDirectory:
    real, root = os.path.realpath(path), os.path.realpath(tree.root)
    below = [os.path.realpath(directory) for directory in safe]
    if not any(_is_below(real, directory) for directory in below):
        # The error names the path as given: a user without access must not learn where a link leads.
        raise RestrictedPath(f"{path} is below none of the datastore's SAFE_DIRS")
    _refuse(path, real, (root, *map(os.path.realpath, others), *NEVER))
    if not os.path.isdir(real):
        raise MissingImage(f"{here(path)} is no directory")
    if not re.match(PATH, real):
        raise NotSupported(f"{path} is at {real!r}, a name that OpenNebula cannot keep as SOURCE of an image")
    os.close(opened(real))
    return FoundDirectory(real)


def _is_below(path: str, directory: str) -> bool:
    return path == directory or directory == "/" or path.startswith(f"{directory}/")


def _refuse(path: str, real: str, closed: tuple[str, ...]) -> None:
    for directory in closed:
        if _is_below(real, directory) or _is_below(directory, real):
            raise RestrictedPath(f"{path} has to do with {directory}, which no guest may be given")


def opened(path: str) -> int:
    """Open a directory as any user of this machine could, through no link, as a user may have put one there.

    Raise MissingImage, ShareRefused; RestrictedPath if it is ours, or closed to guests, whatever a record
    says.
    """
    _refuse(path, path, NEVER)
    at, fd = "", os.open("/", _DIRECTORY)
    try:
        for name in path.strip("/").split("/"):
            if not os.fstat(fd).st_mode & 0o001:
                raise ShareRefused(
                    f"{here(at or '/')} lets no others pass (chmod o+x), and guests' users are others"
                )
            at = f"{at}/{name}"
            below = os.open(name, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
            if _is_of_ours(fd):
                raise RestrictedPath(
                    f"{here(path)} has to do with {at}, which is ours: no guest may be given it"
                )
    except OSError as e:
        os.close(fd)
        if e.errno == errno.ENOENT:
            raise MissingImage(
                f"{here(at)} is not there: {path} is mounted on all hosts, at the same path"
            ) from None
        if e.errno == errno.EACCES:
            way = os.path.dirname(at) or "/"
            raise ShareRefused(
                f"{here(way)} lets not everybody pass (its group, or an ACL), not the drivers' user either"
            ) from None
        if e.errno in (errno.ENOTDIR, errno.ELOOP):
            raise ShareRefused(
                f"{here(at)} is a link, or no directory, where {path} was one when it was registered"
            ) from None
        raise
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_ours(found: os.stat_result) -> bool:
    """Return True if something belongs to root or the drivers' user, as everything of ours does."""
    return found.st_uid in (0, os.stat(__file__).st_uid, os.geteuid())


def _is_of_ours(fd: int) -> bool:
    """Return True if a directory is a store, a root, or anything else of ours with a side directory.

    A guest may name what it makes, or rename what it has got: neither makes a directory ours.
    """
    try:
        found = os.lstat(disk_names.SIDE, dir_fd=fd)
    except FileNotFoundError:
        return False
    except PermissionError:
        # Closed to the drivers' user, so not ours: that user has made everything of ours. The daemon checks
        # again, as root.
        return False
    return is_ours(found) and is_ours(os.fstat(fd))


def _place(tree: Tree, image: int) -> str:
    return f"{tree.root}/{share_names.tree(image)}"


def make(tree: Tree, share: Share) -> str:
    """Create the empty place where the daemon mounts the directory; return its path."""
    path = _place(tree, share.image)
    if not os.path.lexists(path):
        os.mkdir(path, 0o555)
        files.fsync(tree.root)
        point("place of the directory made")
    return path


def remove(tree: Tree, image: int) -> None:
    """Remove the empty place; the directory stays. Raise DataInTheWay if the place is not empty."""
    path = _place(tree, image)
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError as e:
        if e.errno != errno.ENOTEMPTY:
            raise
        raise DataInTheWay(f"{here(path)} is not empty, and nothing of ours is in it") from None
    files.fsync(tree.root)
    point("place of the directory removed")
