# SPDX-License-Identifier: Apache-2.0
"""Plans of the datastore actions where images are shares (DISK_TYPE = FILESYSTEM, OpenNebula 7.4).

Of such images oned asks its driver for `stat` (PATH alone), `cp`, `rm` and `monitor`; without a PATH it asks
nothing at all, and clones none (docs/explanation/contract.md). What it counts against quotas is the answer to
`stat`.
"""

from __future__ import annotations

import re
from typing import Any, Collection, Protocol

from ...errors import BadAttribute, NotSupported, StoreAbsent
from ...model.exchange import Part, T, ask, here, warn
from ...model.refs import Step
from ...model.share import share as share_share
from ...model.share import steps as share_steps
from ...model.store.datastore_steps import ListRoots
from ...opennebula.args import absolute
from ...opennebula.states import ImageType
from ...opennebula.xml import Datastore, Image
from ...units import GiB, KiB, MiB, TiB, mib_ceil
from ..image import images

SIZE = re.compile(r"([1-9][0-9]{0,8})([MGT])\Z")
UNITS = {"M": MiB, "G": GiB, "T": TiB}
LAYOUTS = {
    "stripes": re.compile(r"(1|2|4|8|16|32|64)\Z"),
    "object": re.compile(r"(64K|128K|256K|512K|1M|2M|4M|8M|16M|32M|64M)\Z"),
    "pool": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}\Z"),
}
FIELDS = {"object": "object_size"}
LAYOUT = "stripes=1, 2, 4 ... 64, object=64K, 128K ... 64M and pool=NAME"


class Asked(Protocol):
    """The request of a datastore action (plan/store/datastore.py)."""

    @property
    def image(self) -> Image: ...
    @property
    def datastore(self) -> Datastore: ...
    @property
    def max_size(self) -> int: ...


def size_of(text: str, most: int, what: str = "PATH") -> int:
    """Return the bytes of 10G, at most `most`; raise BadAttribute, which names `what`."""
    match = SIZE.match(text)
    size = int(match.group(1)) * UNITS[match.group(2)] if match else 0
    if not 0 < size <= most:
        raise BadAttribute(
            f"{what} asks for {text!r}: the size of a share is a whole number with M, G or T, of "
            f"at most {most // MiB}M"
        )
    return size


def wanted(path: str, most: int, fs: str, pools: Collection[str] = ()) -> tuple[int, dict[str, Any]]:
    """Return the bytes and the layout (fields of Share) of `new:SIZE`; at most `most`; raise BadAttribute.

    `pools`: those in which users may have content.
    """
    text, *options = path[len(images.NEW_SHARE) :].split(",")
    size = size_of(text, most)
    found: dict[str, Any] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in LAYOUTS or FIELDS.get(name, name) in found or not LAYOUTS[name].match(value):
            raise BadAttribute(
                f"PATH asks for {option!r}: after the size of a share there may be {LAYOUT}, each once"
            )
        if not share_share.BACKENDS[fs].has_manager:
            raise BadAttribute(
                f"PATH asks for {option!r}: shares on {fs} have no layouts, those on cephfs do"
            )
        if name == "pool" and value not in pools:
            raise BadAttribute(
                f"PATH asks for {option!r}, which SEMISHARED_FS_POOLS of the datastore does not name"
            )
        if name == "object":
            found[FIELDS[name]] = int(value[:-1]) * {"K": KiB, "M": MiB}[value[-1]]
        else:
            found[name] = int(value) if name == "stripes" else value
    return size, found


def new_share(path: str) -> str:
    """Return the `new:SIZE` that PATH asks for, '' where it names a directory.

    `oneimage create --path` puts the user's working directory before a relative path: new:10G comes as
    /home/user/new:10G. No directory of such a name can be registered: SOURCE has no colon
    (share/registered.py).
    """
    name = path.rpartition("/")[2] if path.startswith("/") else path
    return name if name.startswith(images.NEW_SHARE) else ""


def _wanted(asked: Asked, new: str) -> tuple[int, dict[str, Any]]:
    return wanted(
        new,
        asked.max_size,
        share_share.tree(asked.datastore).fs,
        share_share.pools(asked.datastore),
    )


def _done(asked: Asked, step: Step[T]) -> Part[T]:
    return (yield from ask(share_share.bridge(asked.datastore), step))


def _check_root(datastore: Datastore) -> None:
    if not share_share.tree(datastore).marker:
        raise StoreAbsent(
            f"nothing says that {share_share.tree(datastore).root} is the root of shares: `semishared "
            f"share init {datastore.id}` does"
        )


def _directory(asked: Asked) -> Part[str]:
    """Return the real path of the directory at PATH; its content is not ours and not counted."""
    path = asked.image.path
    if not path.startswith("/"):
        raise NotSupported(
            f"PATH is {path!r}: a new share is new:SIZE (new:10G), a directory that is there its "
            f"absolute path"
        )
    safe = tuple(entry for entry in asked.datastore.attribute("SAFE_DIRS").split() if entry.startswith("/"))
    others = tuple((yield from here(ListRoots())))
    step = share_steps.FindDirectory(share_share.tree(asked.datastore), absolute(path, "PATH"), safe, others)
    return (yield from _done(asked, step)).source


def stat(asked: Asked) -> Part[str]:
    """Plan stat: the MiB that oned counts; oned names neither the image's type nor its owner."""
    new = new_share(asked.image.path)
    _check_root(asked.datastore)
    if new:
        return str(mib_ceil(_wanted(asked, new)[0]))
    yield from _directory(asked)
    return "0"


def cp(asked: Asked) -> Part[str]:
    """Plan cp: make the share, or register a directory that is there as one; SOURCE and FORMAT."""
    image = asked.image
    if image.type != ImageType.FILESYSTEM:
        raise NotSupported(
            f"datastore {asked.datastore.id} has directories for guests: TYPE of image {image.id} "
            f"has to be FILESYSTEM"
        )
    tree = share_share.tree(asked.datastore)
    new = new_share(image.path)
    if new:
        size, more = _wanted(asked, new)
    else:
        size, more = 0, {"directory": (yield from _directory(asked))}
    if image.size != size:
        old = (
            ": before 7.4 OpenNebula asks nobody for the size of such images, so no quota would count it"
            if not image.size
            else ""
        )
        raise NotSupported(
            f"OpenNebula counts {image.size // MiB} MiB for image {image.id}, not {size // MiB}{old}"
        )
    share = share_share.Share(
        image.id, image.number("UID"), image.number("REGTIME"), size, readonly=image.is_readonly, **more
    )
    answer = yield from _done(asked, share_steps.MakeShare(tree, share))
    return f"{answer.source} dir"


def rm(asked: Asked) -> Part[str]:
    """Plan rm: remove the share with its content; of a registered directory only our own files."""
    if asked.image.source:
        yield from _done(
            asked,
            share_steps.RemoveShare(
                share_share.tree(asked.datastore), asked.image.id, absolute(asked.image.source, "SOURCE")
            ),
        )
    return ""


def monitor(asked: Asked) -> Part[str]:
    """Plan monitor: the capacity of the file system that the shares are in, in MiB."""
    if not share_share.tree(asked.datastore).marker:
        # An error every minute would hide others: without a root it has no capacity.
        yield warn(
            f"datastore {asked.datastore.id} has no root yet: `semishared share init {asked.datastore.id}`"
        )
        return "USED_MB=0\nTOTAL_MB=0\nFREE_MB=0"
    used, total, free = yield from _done(asked, share_steps.MeasureRoot(share_share.tree(asked.datastore)))
    return f"USED_MB={used // MiB}\nTOTAL_MB={total // MiB}\nFREE_MB={free // MiB}"


ACTIONS = {planner.__name__: planner for planner in (stat, cp, rm, monitor)}
REFUSED = {
    "mkfs": "holds no disks: an image with TYPE = FILESYSTEM and PATH = new:SIZE is a new share",
    "clone": "holds directories for guests, and none is cloned: copy in a guest that has both",
    "export": "holds directories for guests, which no marketplace takes: pack it in a guest, and upload that",
}
SNAPSHOTS = "holds directories for guests, of which there are no snapshots"


def planned(action: str, asked: Asked) -> Part[str]:
    """Plan a datastore action; raise NotSupported for one that shares do not have."""
    if action not in ACTIONS:
        raise NotSupported(f"datastore {asked.datastore.id} {REFUSED.get(action, SNAPSHOTS)}")
    return (yield from ACTIONS[action](asked))
