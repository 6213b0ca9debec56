# SPDX-License-Identifier: Apache-2.0
"""Whether a directory may be given to a guest, and as which users: asked on the VM's host, by what starts the VM and by what gives it.

All of it is read below the share's root, which only root and the drivers' user may write to: guests write to trees alone.
"""

from __future__ import annotations

import os
import re

from ..errors import BadRecord, MissingImage, ShareRefused
from ..model import layout, layout_share
from ..model.shares import PATH, Tree
from ..store import marker
from . import life, owners

SAFE = {"nosuid": os.ST_NOSUID, "nodev": os.ST_NODEV}
"""What a mount has to say: what guests make setuid, or a device, is none on the host."""


def check(image: int, source: str, root_marker: str = "", born: int = -1) -> int:
    """Return the first of the users that a guest's users are there; raise ShareRefused, BadRecord, MissingImage, StoreAbsent, OtherStore.

    `image`: whose share it has to be, -1 for whoever's it is; `root_marker`: of the root that the datastore has, '' if that is not known;
    `born`: when the image was made, as oned has it, -1 if that is not known.
    """
    here, (root, number) = os.uname().nodename, layout_share.root_and_image(source)
    if not re.match(PATH, source) or number < 0 or image not in (-1, number) or os.path.realpath(source) != source:
        raise ShareRefused(f"{source} on {here} is no share that semishared has made{f' for image {image}' if image >= 0 else ''}")
    if not os.path.isdir(root):
        raise MissingImage(f"{root} on {here} is not there: a root of shares is mounted on all hosts, at the same path")
    for path in (root, f"{root}/{layout.SIDE}", f"{root}/{layout_share.SHARES}", f"{root}/{layout_share.record(number)}"):
        _check_ours(path)
    marker.check(root, root_marker)
    known = life.read(Tree("plain", root), number)
    if not known or known.source != source:
        raise ShareRefused(f"{root}/{layout_share.record(number)} on {here} does not say that {source} is ready")
    if born not in (-1, known.share.born):
        raise ShareRefused(f"{source} on {here} is of another image {number}: that was made at {known.share.born}, this one at {born}")
    if not os.path.isdir(source):
        raise MissingImage(f"{source} on {here} is not there")
    flags = os.statvfs(source).f_flag
    missing = [word for word, flag in SAFE.items() if not flags & flag]
    if missing:
        raise ShareRefused(f"{source} on {here} is mounted without {' and '.join(missing)}: guests' files would be that here")
    at = root
    while at:
        if not os.lstat(at).st_mode & 0o001:
            raise ShareRefused(f"{at} on {here} lets no others pass (chmod o+x), and guests' users are others: nobody could use {source}")
        at = os.path.dirname(at).rstrip("/")
    _check_ours(f"{root}/{layout_share.UIDS}")
    return owners.known_uid_of(root, known.share.owner)


def _check_ours(path: str) -> None:
    """Raise ShareRefused if others than root and the drivers' user can have made what is at `path`."""
    try:
        found = os.lstat(path)
    except OSError as e:
        raise ShareRefused(f"{path} on {os.uname().nodename}: {e.strerror}: this is no root of shares: is it mounted?") from None
    if found.st_uid not in (0, os.stat(__file__).st_uid, os.geteuid()) or found.st_mode & 0o022:
        raise BadRecord(f"{path} on {os.uname().nodename} can be written to by others than root and the drivers' user")
