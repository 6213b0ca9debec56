# SPDX-License-Identifier: Apache-2.0
"""Whether a host may give a directory to a guest, as which users, and which one.

The VM's host checks when it starts the VM, and when the daemon starts. It reads only files below the share's
root, which root and the drivers' user alone may write to: guests write to trees only.
"""

from __future__ import annotations

import os
import re

from ..errors import BadRecord, MissingImage, ShareRefused, here
from ..model.attributes import PATH
from ..model.disk import names as disk_names
from ..model.share import names as share_names
from ..model.share.share import Tree
from ..named import NamedTuple
from ..store.dir import marker
from ..tools import files
from . import life, owners, registered

SAFE = {"nosuid": os.ST_NOSUID, "nodev": os.ST_NODEV}
"""Mount options that a share needs: on the host, guests' setuid programs and devices must have no effect."""


class Given(NamedTuple):
    """What a host gives to a guest."""

    first: int
    """First of the host's users to which the guest's users are mapped."""
    directory: str
    """A registered directory to mount at the share's path first; '' for a share of ours."""
    readonly: bool = False
    """The image was read-only when the share was made."""


def check(image: int, source: str, root_marker: str = "", born: int = -1) -> Given:
    """Return how a guest is given a share.

    Raise ShareRefused, BadRecord, MissingImage, StoreAbsent, OtherStore; RestrictedPath for a registered
    directory that is ours.

    `image`: the image that the share must be of, -1 for any; `root_marker`: the datastore's marker, '' if
    unknown; `born`: when the image was made, as oned has it, -1 if unknown.
    """
    root, number = share_names.root_and_image(source)
    is_share = re.match(PATH, source) and number >= 0 and os.path.realpath(source) == source
    if not is_share or image not in (-1, number):
        which = f" for image {image}" if image >= 0 else ""
        raise ShareRefused(f"{here(source)} is no share that semishared has made{which}")
    if not os.path.isdir(root):
        raise MissingImage(
            f"{here(root)} is not there: a root of shares is mounted on all hosts, at the same path"
        )
    # An NFS client that has looked for it before it was made caches for half a minute that it is missing.
    directories = (root, f"{root}/{disk_names.SIDE}", f"{root}/{share_names.SHARES}")
    files.refresh(*directories)
    for path in (*directories, f"{root}/{share_names.record(number)}"):
        _check_ours(path)
    marker.check(root, root_marker)
    known = life.read(Tree("plain", root), number)
    if not known or known.source != source:
        raise ShareRefused(
            f"{here(f'{root}/{share_names.record(number)}')} does not say that {source} is ready"
        )
    if born not in (-1, known.share.born):
        made = f"that was made at {known.share.born}, this one at {born}"
        raise ShareRefused(f"{here(source)} is of another image {number}: {made}")
    if not os.path.isdir(source):
        raise MissingImage(f"{here(source)} is not there")
    _check_mount(known.share.directory or source, bool(known.share.directory))
    at = root
    while at:
        if not os.lstat(at).st_mode & 0o001:
            why = f"and guests' users are others: nobody could use {source}"
            raise ShareRefused(f"{here(at)} lets no others pass (chmod o+x), {why}")
        at = os.path.dirname(at).rstrip("/")
    _check_ours(f"{root}/{share_names.UIDS}")
    return Given(owners.known_uid_of(root, known.share.owner), known.share.directory, known.share.readonly)


def _check_mount(path: str, is_registered: bool) -> None:
    """Raise ShareRefused unless the mount has nosuid and nodev; for a registered directory as `opened`."""
    fd = registered.opened(path) if is_registered else os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        flags = os.fstatvfs(fd).f_flag
    finally:
        os.close(fd)
    missing = [word for word, flag in SAFE.items() if not flags & flag]
    if missing:
        raise ShareRefused(
            f"{here(path)} is mounted without {' and '.join(missing)}: guests' files would be that here"
        )


def _check_ours(path: str) -> None:
    """Raise ShareRefused or BadRecord unless only root and the drivers' user can write to `path`."""
    try:
        found = os.lstat(path)
    except OSError as e:
        raise ShareRefused(f"{here(path)}: {e.strerror}: this is no root of shares: is it mounted?") from None
    if not registered.is_ours(found) or found.st_mode & 0o022:
        raise BadRecord(f"{here(path)} can be written to by others than root and the drivers' user")
