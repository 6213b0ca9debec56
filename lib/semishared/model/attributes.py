# SPDX-License-Identifier: Apache-2.0
"""Our attributes in the templates of OpenNebula's objects: a row for each. A new one is a row and its reader.

The row decides what is refused when it is read, what `setup` and `doctor` say of it
(plan/image/attributes.py), what oned.conf says of it (install/configuration.py), and its row in
docs/reference/attributes.md (docs/generate.py).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Optional, Tuple

from ..errors import BadAttribute
from ..named import NamedTuple
from .device.classes import WORDS
from .disk.place import IO_CLASSES, NORMAL, PLACES
from .store.access import CONF, MARKER, MONITOR, POOL, SECRET, STORED

if TYPE_CHECKING:
    from typing import Protocol

    class Holder(Protocol):
        """An image, a datastore or a host of OpenNebula's; this side of the wire has its XML."""

        @property
        def id(self) -> int: ...

        def attribute(self, name: str) -> str: ...


PREFIX = "SEMISHARED_"
IMAGE, IMAGE_DS, SYSTEM_DS, HOST = "image", "image datastore", "system datastore", "host"
PATH = r"(/[A-Za-z0-9_][A-Za-z0-9_.\-]*)+\Z"
"""The path of a share's root: oned takes what follows a blank in SOURCE for the format."""


class Attribute(NamedTuple):
    """All of an attribute but the function that reads it."""

    name: str
    of: Tuple[str, ...]
    """The objects that may have it. An image's word comes before its datastore's."""
    doc: str = ""
    values: Tuple[str, ...] = ()
    """The words that it may be, in any case."""
    default: str = ""
    """The value if no object has it."""
    form: str = ""
    """A pattern of its value, where that is no word of `values`."""
    what: str = ""
    """Either in words."""
    several: bool = False
    """It may be several of `values`, each once, in this order."""
    is_restricted: bool = True
    """Only administrators may set it on images: where disks live, what goes to hosts, what may be lost, which
    VM gets a key.
    """
    is_inherited: bool = False
    """oned copies it into the VM's disk, where deploy looks for it (plan/libvirt/filesystems.py)."""
    has_commas: bool = False
    """Its words may have commas between them, as Sunstone's form for Ceph writes them."""

    def text(self, holder: Optional[Holder]) -> str:
        """Return the value in a template, '' for none."""
        return holder.attribute(self.name) if holder else ""

    def parsed(self, text: str, holder: str) -> str:
        """Return the value that a text of `holder` means; raise BadAttribute if it is none."""
        found, fits = text, bool(re.match(self.form, text)) and ".." not in text.split("/")
        if self.values:
            words = text.lower().replace(",", " ").split() if self.several else [text.strip().lower()]
            found, fits = " ".join(words), {*words} <= {*self.values} and 0 < len({*words}) == len(words)
        if not fits:
            what = (
                self.what
                or f"one of {', '.join(self.values)}" + " or several of them, each once" * self.several
            )
            raise BadAttribute(f"{self.name} of {holder} is {text[:100]!r}, not {what}")
        return found

    def said(self, image: Optional[Holder], datastore: Holder) -> Tuple[str, str]:
        """Return the value in force, and which object has it ('': neither); raise BadAttribute."""
        for holder, kind in ((image, "image"), (datastore, "datastore")):
            if holder and self.text(holder):
                return self.parsed(self.text(holder), f"{kind} {holder.id}"), f"{kind} {holder.id}"
        return self.default, ""

    def value(self, image: Optional[Holder], datastore: Holder) -> str:
        """Return the value in force; raise BadAttribute."""
        return self.said(image, datastore)[0]

    def of_store(self, datastore: Holder) -> str:
        """Return the value of a datastore; raise BadAttribute."""
        return self.said(None, datastore)[0]

    def words(self, datastore: Holder) -> Tuple[str, ...]:
        """Return the words of a datastore's value, each of this form; raise BadAttribute."""
        text = self.text(datastore)
        words = (text.replace(",", " ") if self.has_commas else text).split()
        for word in words:
            if not re.match(self.form, word):
                text = f"{self.name} of datastore {datastore.id} has {word!r}, which is no {self.what}"
                raise BadAttribute(text)
        return tuple(words)

    def line(self, value: str) -> str:
        """Return the line of a template with a value."""
        return f'{self.name} = "{value}"\n'


def _disk(name: str, values: Tuple[str, ...], doc: str, **more: Any) -> Attribute:
    return Attribute(name, (IMAGE, IMAGE_DS), doc, values, **{"default": values[0], **more})


def _store(name: str, doc: str, form: str = "", what: str = "", **more: Any) -> Attribute:
    return Attribute(name, (IMAGE_DS,), doc, form=form, what=what, **more)


def _user(name: str, doc: str = "") -> Attribute:
    return _store(name, doc, POOL, "the name of a Ceph user")


LOCALS = tuple(
    place.name for place in PLACES.values() if place.is_local and place.is_layered and not place.commits
)
"""Volatile disks, which have no layers, are of no image; the one that commits is for persistent images."""
SECRETS, CONFS, IDS = "the UUID of a libvirt secret", "a plain absolute path", "(32 hex digits)"

PLACE = _disk("SEMISHARED_PLACE", ("auto", "shared", "local"), "where the disk lives")
LOCAL = _disk("SEMISHARED_LOCAL", LOCALS, "how a disk that is not persistent lives on the host")
STAGE = _disk("SEMISHARED_STAGE", ("no", "on-upload"), "whether its base comes to hosts before a VM needs it")
DETACH = _disk(
    "SEMISHARED_DETACH", ("on-request", "after-boot"), "when remote-first disks let go of the store"
)
ON_HOST_FAILURE = _disk(
    "SEMISHARED_ON_HOST_FAILURE", ("wait", "recreate"), "whether a disk of a lost host may begin anew"
)
IO_CLASS = _disk(
    "SEMISHARED_IO_CLASS", IO_CLASSES, "how much a disk may read and write", default=NORMAL
)._replace(of=(IMAGE, IMAGE_DS, SYSTEM_DS))
CLASS = _disk(
    "SEMISHARED_CLASS",
    WORDS,
    "on which devices of its host's pool a local disk lies, several in the order in which they are tried",
    default="",
    several=True,
)
BASES = _disk("SEMISHARED_BASES", ("disk", "ram"), "from where guests read the base of an overlay")
STATE = Attribute(
    "SEMISHARED_STATE",
    (IMAGE,),
    "nothing: `semishared publish` writes it, for Sunstone",
    what="a line of text",
    is_restricted=False,
)
"""Users may write it, and nothing reads it (plan/care/vm_vector.py says why)."""
SHARE_ACCESS = _disk(
    "SEMISHARED_SHARE_ACCESS", ("virtiofs", "client"), "how a guest comes to a share", is_inherited=True
)

STORE = _store("SEMISHARED_STORE", "which store is its own", MARKER, f"the id of a store {IDS}")
CLOUD = _store("SEMISHARED_CLOUD", "which OpenNebula it is of", MARKER, f"the id of a cloud {IDS}")
CEPH_USER = _user("CEPH_USER")
CEPH_READER = _user(
    "SEMISHARED_CEPH_READER", "the user that copies bases to hosts: read-only is enough. Default: `CEPH_USER`"
)
CEPH_BRIDGE_USER = _user(
    "SEMISHARED_CEPH_BRIDGE_USER", "the user that changes images, on the bridge. Default: `CEPH_USER`"
)
CEPH_FENCE_USER = _user(
    "SEMISHARED_CEPH_FENCE_USER",
    "the user that [fences](../how-to/dead-host.md) hosts, on front-ends: its own. Default: no user",
)
CEPH_REMOTE = _user(
    "SEMISHARED_CEPH_REMOTE",
    "the user with which QEMU reads the image below a `remote-first` disk: its key can write no data. "
    "Default: `CEPH_USER`",
)
CEPH_REMOTE_SECRET = _store(
    "SEMISHARED_CEPH_REMOTE_SECRET",
    "with the key of `SEMISHARED_CEPH_REMOTE`, the same on all hosts; both are there, or none",
    SECRET,
    SECRETS,
)
CEPH_HOST = _store("CEPH_HOST", "", MONITOR, "address[:port]")._replace(has_commas=True)
COMPATIBLE = _store("COMPATIBLE_SYS_DS", "")
BRIDGE_LIST = _store("BRIDGE_LIST", "", POOL, "host name")
CEPH_SECRET = _store("CEPH_SECRET", "", SECRET, SECRETS)
LUKS_SECRET = Attribute("LUKS_SECRET", (IMAGE,), form=SECRET, what=SECRETS)
CEPH_CONF = _store("CEPH_CONF", "", CONF, CONFS)
POOL_NAME = _store("POOL_NAME", "", POOL, "the name of a pool", default="one")
EC_POOL_NAME = _store("EC_POOL_NAME", "", POOL, "the name of a pool")

FS = _store("SEMISHARED_FS", "what holds a share to its size", values=("btrfs", "xfs", "cephfs", "plain"))
FS_VOLUME = _store(
    "SEMISHARED_FS_VOLUME", "the group of subvolumes that `cephfs` needs", STORED, "FILE_SYSTEM/GROUP"
)
FS_POOLS = _store(
    "SEMISHARED_FS_POOLS", "data pools of `cephfs` that users may name for a share", POOL, "name of a pool"
)
FS_ROOT = _store("SEMISHARED_FS_ROOT", "the directory that all shares are in", PATH, CONFS)
FS_QUOTA = _store(
    "SEMISHARED_FS_QUOTA", "`no` with `plain`", what="yes or no", values=("yes", "no"), default="yes"
)

ROOM, DEVICES = "`200G`, `30%` or `none`", "`/PATH`, `/PATH=CLASS`, `/PATH=CLASS:WEIGHT`, blanks between"
BASES_LIMIT = Attribute("SEMISHARED_BASES_LIMIT", (HOST,), "what bases may take there", what=ROOM)
BASES_FLOOR = Attribute("SEMISHARED_BASES_FLOOR", (HOST,), "what stays free beside them", what=ROOM)
HOST_POOL = Attribute("SEMISHARED_POOL", (HOST,), "where its disks and bases lie", what=DEVICES)
FENCED = Attribute("SEMISHARED_FENCED", (HOST,), "nothing: it is of an older version")

REFUSABLE = frozenset(
    (
        *("CACHE_ENABLE", "CEPH_KEY", "LVM_THIN_ENABLE"),
        *("NFS_AUTO_ENABLE", "QCOW2_STANDALONE", "RBD_FORMAT", "RECOVERY_SNAPSHOT_FREQ"),
    )
)
"""Attributes of stock's that an action may refuse by name; model/stock.py is loaded where one of these is."""
DISK_TYPES = ("", "FILE", "RBD", "FILESYSTEM")
"""Those of datastores of ours. Nearly each datastore has one, so the name alone loads nothing."""

TM_CONF = (
    ("LN_TARGET", "NONE", True),
    ("CLONE_TARGET", "SYSTEM", True),
    ("SHARED", "NO", True),
    ("DS_MIGRATE", "YES", False),
    ("DS_LIVE_MIGRATE", "YES", False),
    ("DS_MIGRATE_SNAP", "YES", False),
    ("ALLOW_ORPHANS", "YES", True),
)
"""What oned.conf says of the driver (docs/explanation/contract.md): key, value, and whether it must have that
value; else an administrator's other choice stays.
"""


def known() -> dict[str, Attribute]:
    """Return our attributes by their names, in their order here."""
    rows = [row for row in globals().values() if isinstance(row, Attribute)]
    return {row.name: row for row in rows if row.name.startswith(PREFIX)}


def of_images() -> list[Attribute]:
    """Return those that images may say."""
    return [row for row in known().values() if IMAGE in row.of]
