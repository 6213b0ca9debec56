# SPDX-License-Identifier: Apache-2.0
"""The names and paths of what is ours in a mounted store; see model/disk/names.py.

<datastore>/<image>  <image>.snap/<snapshot>
<datastore>/.semishared/store                            its marker
                        .uploads.lock  .uploads/<image>/lock
                        .epochs/<vm>-<seq>-<cloud>       since when which VM is elsewhere than on a host that
                        was lost
                        <image>/image  session  generation.json  manifest  owner.json
                                commit/journal.json  ranges  data  image  manifest    a commit that is decided
                                commits/.staged-*                                     one that is not
                                clones/<vm>-<disk>-<cloud>  clones/<vm>-<disk>-<cloud>.snap/<layer>
                                .../pull.json
"""

from __future__ import annotations

import re
from typing import Optional

from ...named import NamedTuple
from ..disk import names as disk_names
from ..disk.names import SIDE

MARKER = "store"
UPLOADS = ".uploads"
UPLOADS_LOCK = f"{UPLOADS}.lock"
ROOM_LOCK = ".room.lock"
EPOCHS = ".epochs"


def is_image(name: str) -> bool:
    """Tell whether a name is one that our datastore driver gives."""
    return re.match(r"[0-9a-f]{32}\Z", name) is not None


def is_side(name: str) -> bool:
    """Tell whether an entry of `.semishared` is the directory of an image."""
    return not name.startswith(".") and name != MARKER


def side(image: str = "") -> str:
    """Return our directory (that of an image, if one is named), seen from the datastore's."""
    return f"{SIDE}/{image}" if image else SIDE


def store_of(path: str) -> str:
    """Return the datastore of a path below our directory in it, '' for any other."""
    before, found, _ = path.partition(f"/{SIDE}/")
    return before if found else ""


def link(side: str) -> str:
    """Return the link to the image, by the path of its directory of ours."""
    return f"{side}/image"


def link_target(image: str) -> str:
    return f"../../{image}"


def session(side: str) -> str:
    return f"{side}/session"


def generation(side: str) -> str:
    return f"{side}/generation.json"


def manifest(side: str) -> str:
    return f"{side}/manifest"


def owner(side: str) -> str:
    """Return the record of the disk that may commit to the image (store/commit/claims.py)."""
    return f"{side}/owner.json"


# -- commits (store/dir/journal.py) -----------------------------------------------------------------

COMMIT = "commit"
COMMITS = "commits"


def commit(side: str) -> str:
    """Return the journal of a commit that is decided, and whose effects are under way."""
    return f"{side}/{COMMIT}"


def commits(side: str) -> str:
    """Return the directory of the journals that are being written."""
    return f"{side}/{COMMITS}"


def journal(directory: str) -> str:
    return f"{directory}/journal.json"


def journal_ranges(directory: str) -> str:
    return f"{directory}/ranges"


def journal_data(directory: str) -> str:
    return f"{directory}/data"


def journal_image(directory: str) -> str:
    """Return the new content of the image, where that is made beside it."""
    return f"{directory}/image"


# -- uploads ----------------------------------------------------------------------------------------


def upload_lock(directory: str) -> str:
    """Return the lock that an upload holds in its directory."""
    return f"{directory}/lock"


def epochs() -> str:
    """Return the directory of the epochs of VMs, seen from the datastore's."""
    return f"{SIDE}/{EPOCHS}"


class Epoch(NamedTuple):
    """What the name of an epoch says."""

    vm: int
    epoch: int
    cloud: str
    """'' of a cloud without an id."""


def epoch_name(vm: int, epoch: int, cloud: str = "") -> str:
    return f"{vm}-{epoch}-{cloud}" if cloud else f"{vm}-{epoch}"


def epoch_named(name: str) -> Optional[Epoch]:
    """Return what such a name says, None if it is none."""
    match = re.match(r"([0-9]+)-([0-9]+)(?:-([0-9a-f]{32}))?\Z", name)
    return Epoch(int(match.group(1)), int(match.group(2)), match.group(3) or "") if match else None


def link_of(source: str) -> str:
    """Return the link to the image `source` of a mounted store."""
    directory, _, name = source.rpartition("/")
    return link(f"{directory}/{side(name)}")


# -- clones -----------------------------------------------------------------------------------------


class Clone(NamedTuple):
    """What the name of a clone, or of the directory of its layers, says."""

    vm: int
    disk: int
    cloud: str
    """'' of 0.1.0, and of a cloud without an id."""
    are_layers: bool = False


CLONES = "clones"


def clones(side: str) -> str:
    return f"{side}/{CLONES}"


def clone_name(vm: int, disk: int, cloud: str = "") -> str:
    return f"{vm}-{disk}-{cloud}" if cloud else f"{vm}-{disk}"


def clone(side: str, vm: int, disk: int, cloud: str = "") -> str:
    return f"{clones(side)}/{clone_name(vm, disk, cloud)}"


def clone_named(name: str) -> Optional[Clone]:
    """Return what such a name says, None if it is none."""
    own = disk_names.disk_of(name)
    match = re.match(r"([0-9]+)-([0-9]+)(?:-([0-9a-f]{32}))?\Z", own)
    return (
        Clone(int(match.group(1)), int(match.group(2)), match.group(3) or "", own != name) if match else None
    )


def is_clone_of(path: str, vm: int, disk: int) -> bool:
    """Tell whether a path is that of a clone for a disk, of whatever cloud, in a datastore."""
    return (
        re.match(rf"/.+/{re.escape(SIDE)}/[^/]+/{CLONES}/{vm}-{disk}(-[0-9a-f]{{32}})?\Z", path) is not None
    )


def seq_note(folder: str) -> str:
    """Return the note of the SEQ at which a VM's clone was made or taken over, by its layers' directory."""
    return f"{folder}/seq.json"


def pull_note(folder: str) -> str:
    """Return the note of a pull into a layer of a clone, by the directory of its layers."""
    return f"{folder}/pull.json"


def side_of(path: str) -> str:
    """Return the directory of the image in which a clone, or a layer of one, lies; '' for any other path."""
    before, found, _ = path.rpartition(f"/{CLONES}/")
    return before if found else ""
