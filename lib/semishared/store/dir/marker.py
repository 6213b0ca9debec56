# SPDX-License-Identifier: Apache-2.0
"""The marker of a mounted store, which an empty mount point lacks.

    <datastore>/.semishared/store      {"version": 1, "id": "32 hex digits", "cloud": "32 hex digits"}

`cloud` names the OpenNebula cloud of a root of shares, where image ids alone are ambiguous; other stores have
none. The id is also SEMISHARED_STORE in the datastore's template, and part of every image reference
(model/store/access.Access). Each check opens and reads the marker: a client of a network file system may
serve a lookup, also a negative one, from its cache.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

from ...errors import OtherStore, StoreAbsent, StoreUnavailable
from ...model.store import dir_names
from ...model.store.access import NETWORK
from ...named import NamedTuple
from ...tools import beneath, files

if TYPE_CHECKING:
    from typing import Callable, Sequence

BELOW = dir_names.side(dir_names.MARKER)
VERSION = 1
LIMIT = 4096
"""Most bytes of a marker."""


class Said(NamedTuple):
    """The content of a marker."""

    store: str = ""
    """The store's id; '' if there is no marker."""
    cloud: str = ""
    """The cloud's id; '' if the marker has none."""


def path_in(store_dir: str) -> str:
    """Return where the marker of a store lies."""
    return f"{store_dir}/{BELOW}"


def read(store_dir: str) -> str:
    """Return the id in the marker, '' if there is none; raise as `said`."""
    return said(store_dir).store


def said(store_dir: str) -> Said:
    """Return the marker's content; raise StoreUnavailable if it is unreadable or damaged."""
    path = path_in(store_dir)
    node = os.uname().nodename
    try:
        fd = beneath.open_file(store_dir, BELOW)
    except (FileNotFoundError, NotADirectoryError):
        return Said()
    except OSError as e:
        raise StoreUnavailable(f"{path} on {node}: {e.strerror}") from None
    try:
        text = os.read(fd, LIMIT)
    except OSError as e:
        raise StoreUnavailable(f"{path} on {node}: {e.strerror}") from None
    finally:
        os.close(fd)
    try:
        data = json.loads(text)
        found = Said(data["id"], data.get("cloud", ""))
        if data["version"] == VERSION and all(isinstance(word, str) for word in found) and found.store:
            return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise StoreUnavailable(f"{path} on {node} is no marker of a store")


def check(store_dir: str, wanted: str) -> None:
    """Raise StoreAbsent or OtherStore unless the store's id is `wanted`; '' accepts any directory."""
    if not wanted:
        return
    found = read(store_dir)
    node = os.uname().nodename
    if not found:
        raise StoreAbsent(
            f"{store_dir} on {node} is not the datastore's store: its marker {BELOW} is not there"
        )
    if found != wanted:
        raise OtherStore(
            f"{store_dir} on {node} is another datastore's store: its marker says {found}, the "
            f"datastore has {wanted}"
        )


def make_directory(directory: str) -> None:
    """Make the directory of a store that has no marker yet."""
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as e:
        raise StoreUnavailable(f"{directory}: {e.strerror}") from None


def is_there(source: str) -> bool:
    """Return True if an image can be opened."""
    try:
        # Opened: a mere stat might be answered from a cache. A link there is no image.
        os.close(os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
    except OSError:
        return False
    return True


def is_mount(directory: str) -> bool:
    """Tell whether something is mounted for it or for all datastores, or it is on a shared file system."""
    from ...tools import mounts

    mount = mounts.of(directory)
    above = {os.path.realpath(path) for path in (directory, os.path.dirname(directory))} - {"/"}
    return mount.point in above or bool(re.match(NETWORK, mount.type))


def doubt(directory: str, sources: Sequence[str], is_store: Callable[[str], bool]) -> str:
    """Return why a directory without a marker might not be the store, '' if it is.

    `sources` are its images, by oned; without any `is_store` decides.
    """
    if not os.path.isdir(directory):
        return f"{directory} is not there"
    missing = [source for source in sources if not is_there(source)]
    if missing:
        return f"{len(missing)} of {len(sources)} images are not in it, e.g. {missing[0]}"
    if not sources and not is_store(directory):
        return f"nothing is mounted at {directory}"
    return ""


def mark(directory: str, store: str, sources: tuple[str, ...], is_store: bool) -> str:
    """Return the id in the marker of the store at `directory`, here on a bridge; write it unless it is there.

    Raise StoreAbsent for a directory that might be a mere mount point.
    """
    found = read(directory)
    if found:
        return found
    why_not = doubt(directory, sources, lambda path: is_store or is_mount(path))
    if why_not:
        raise StoreAbsent(f"on {os.uname().nodename} {why_not}")
    write(directory, store)
    return store


def write(store_dir: str, store: str, cloud: str = "") -> None:
    """Mark `store_dir` as store `store` of `cloud`; as root, give the marker to the directory's owner."""
    made = not os.path.isdir(f"{store_dir}/{dir_names.side()}")
    with beneath.directory(store_dir, dir_names.side(), make=True) as side:
        files.remove_stale(side)  # of a killed run: no other action looks for it here
        files.write_json(
            f"{side}/{dir_names.MARKER}",
            {"version": VERSION, "id": store, **({"cloud": cloud} if cloud else {})},
            LIMIT,
        )
        if os.geteuid() == 0:
            owner = os.stat(store_dir)
            if made:
                os.chown(side, owner.st_uid, owner.st_gid)
            os.chown(f"{side}/{dir_names.MARKER}", owner.st_uid, owner.st_gid, follow_symlinks=False)
