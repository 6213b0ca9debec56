# SPDX-License-Identifier: Apache-2.0
"""Attributes and configuration that OpenNebula's own storage scripts read: what becomes of each here.

oned asks no driver when an attribute is set. So the first action that would read one which cannot work here
refuses it by name, and `setup` and `doctor` name it before (plan/image/attributes.py). From the rows follow
the refusals, those lines, and tables of docs/reference/attributes.md. tests/unit/stock_attributes.txt lists
what stock's scripts read, and a test holds both together. Loaded only where a template has a name of
attributes.REFUSABLE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterable, Tuple

from ..errors import BadAttribute
from ..named import NamedTuple
from .attributes import STORE

if TYPE_CHECKING:
    from typing import Mapping

STOCK, DIFFERENT, REFUSED, NOTHING = "as stock", "differently", "refused", "no effect"
"""What becomes of one. `NOTHING`: it has no subject here; `setup` and `doctor` say so of a datastore."""
DATASTORE, IMAGE, DISK, HOST, VM, CONFIGURATION = "datastore", "image", "disk", "host", "vm", "configuration"


class Row(NamedTuple):
    """One name, of one kind of object."""

    of: str
    name: str
    verdict: str
    doc: str
    """What it does here, or why it does nothing, or what to do instead; it follows a colon."""
    harmless: Tuple[str, ...] = ()
    """Values, in lower case, that ask for what is so here anyway."""
    named: bool = True
    """Whether a person may set it: what only oned writes is no mistake of anybody's."""

    def is_refused(self, text: str) -> bool:
        """Tell whether an action refuses that value."""
        return self.verdict == REFUSED and self.is_said(text)

    def is_said(self, text: str) -> bool:
        """Tell whether a value asks for what there is not."""
        return (
            self.verdict in (REFUSED, NOTHING)
            and self.named
            and bool(text.strip())
            and text.strip().lower() not in self.harmless
        )

    def words(self, holder: str, text: str) -> str:
        """Return what to say of a value of `holder`."""
        what = "is refused" if self.verdict == REFUSED else "has no effect here"
        return f"{self.name} = {text.strip()[:100]!r} of {holder} {what}: {self.doc}"


def _rows(of: str, verdict: str, *rows: Tuple[str, str], harmless: str = "", named: bool = True) -> list[Row]:
    return [Row(of, name, verdict, doc, tuple(harmless.split()), named) for name, doc in rows]


NO = "no false"
MOUNTS = "no machine mounts by itself here"
CACHE = "only with `CACHE_ENABLE`, which is refused"
BACKUP = (
    "the backup driver keeps it, and so do the copies that `prebackup` makes of a VM that is off, where the "
    "host has a systemd of oneadmin's; without one, and for disks of a running VM, which QEMU itself copies, "
    "a line in oned.log says so"
)
PRIORITY = (
    "the backup driver keeps it, and so do the copies that `prebackup` makes of a VM that is off{}; QEMU "
    "itself copies the disks of a running VM, and a line in oned.log says so"
)
LVM = "no disk of this driver is a logical volume"
VCENTER = "vCenter has gone from OpenNebula"
REPLICA = (
    "hosts get bases from the store and from each other, and no host keeps replicas; a disk of a lost host "
    "that may begin anew says SEMISHARED_ON_HOST_FAILURE = recreate"
)

ROWS: Tuple[Row, ...] = (
    *_rows(
        DATASTORE,
        STOCK,
        ("CEPH_CONF", "Ceph's configuration file"),
        ("CEPH_TRASH", "`yes`: images and clones go to the pool's trash, whole with their snapshots"),
        ("CONVERT", "`no`: an upload is not converted to `DRIVER`"),
        ("EC_POOL_NAME", "the pool for the data of new images"),
        ("LIMIT_TRANSFER_BW", "of downloads"),
        ("NO_DECOMPRESS", "`yes`: a compressed file is stored as it is"),
        ("POOL_NAME", "the pool of the images"),
    ),
    *_rows(
        DATASTORE,
        STOCK,
        ("BASE_PATH", "oned writes it"),
        ("ID", "oned writes it"),
        ("TM_MAD", "oned asks its driver"),
        ("TYPE", "oned writes it"),
        named=False,
    ),
    *_rows(
        DATASTORE,
        DIFFERENT,
        ("CEPH_USER", "required, and never `admin`: without one Ceph takes `client.admin`"),
        (
            "DRIVER",
            "`raw` or `qcow2`, of uploads and clones; with `CONVERT = no` these stay as they are; images on "
            "Ceph are raw",
        ),
        (
            "BRIDGE_LIST",
            "the machines that make and remove images, one by the image's id; the next if that one does not "
            "answer; the front-end need not mount a store that has them, which has to be marked",
        ),
        (
            "STAGING_DIR",
            "with BRIDGE_LIST, where the front-end works on an upload; nothing is staged on the bridge, into "
            "whose store extents are written",
        ),
        ("RESTRICTED_DIRS", "compared by component, where stock compares beginnings"),
        ("SAFE_DIRS", "compared by component; without both attributes `/var/tmp` alone may be read"),
        (
            "SPARSE",
            "`no`: all blocks of an upload's file are allocated; an image may say it too; not on Ceph",
        ),
    ),
    *_rows(
        DATASTORE,
        REFUSED,
        ("CEPH_KEY", "name the keyring in `CEPH_CONF`, and remove this"),
    ),
    *_rows(
        DATASTORE,
        REFUSED,
        ("RBD_FORMAT", "images of format 1 have no layers, those made here have format 2"),
        harmless="2",
    ),
    *_rows(
        DATASTORE,
        REFUSED,
        (
            "NFS_AUTO_ENABLE",
            f"{MOUNTS}, and images would be written below the mount point; mount it at the datastore's "
            "directory on the front-end and all hosts, and have `semishared setup --apply` mark the store: "
            "with its SEMISHARED_STORE each action checks that the mount is there, and this is taken",
        ),
        (
            "CACHE_ENABLE",
            "bases of hosts are that cache, SEMISHARED_BASES_LIMIT of a host bounds it; remove this",
        ),
        ("LVM_THIN_ENABLE", LVM),
        harmless=NO,
    ),
    *_rows(
        DATASTORE,
        REFUSED,
        ("DISK_TYPE", "a store here is FILE, RBD, or FILESYSTEM for shares"),
        harmless="file rbd filesystem",
    ),
    *_rows(
        DATASTORE,
        NOTHING,
        ("NFS_AUTO_HOST", MOUNTS),
        ("NFS_AUTO_PATH", MOUNTS),
        ("NFS_AUTO_OPTS", MOUNTS),
        ("CACHE_MAX_SIZE", CACHE),
        ("CACHE_MIN_AGE", CACHE),
        ("CACHE_PATH", CACHE),
        ("CACHE_UPSTREAMS", CACHE),
        ("REPLICA_HOST", REPLICA),
        ("VCENTER_DS_REF", VCENTER),
    ),
    *_rows(
        DATASTORE,
        NOTHING,
        ("CLONE", "stock's `ceph/delete` reads it of a datastore, which never has it"),
        ("SOURCE", "stock's `ceph/delete` reads it of a datastore, which never has it"),
        named=False,
    ),
    *_rows(
        DATASTORE,
        DIFFERENT,
        ("*_CPU_QUOTA", BACKUP),
        ("*_IONICE", PRIORITY.format(" (without it in the idle class)")),
        ("*_MAX_RIOPS", BACKUP),
        ("*_MAX_WIOPS", BACKUP),
        ("*_MEMORY_MAX_MB", BACKUP),
        ("*_NICE", PRIORITY.format("")),
    ),
    *_rows(
        DISK,
        REFUSED,
        ("QCOW2_STANDALONE", "the image's administrator says SEMISHARED_LOCAL = copy"),
        ("LVM_THIN_ENABLE", LVM),
        harmless=NO,
    ),
    *_rows(
        DISK,
        REFUSED,
        ("RECOVERY_SNAPSHOT_FREQ", "nothing here saves such snapshots; make backups"),
        harmless="0",
    ),
    *_rows(
        DISK,
        DIFFERENT,
        (
            "SPARSE",
            "`no`: all blocks of a disk are allocated where it is made, of overlays and store clones too; a "
            "move brings its data alone; an image's template may say it for all its disks; not on Ceph",
        ),
    ),
    *_rows(DISK, REFUSED, ("RBD_FORMAT", "disks made here have RBD format 2"), harmless="2"),
    *_rows(DISK, STOCK, ("FS", "of a volatile disk"), ("FORMAT", "of a volatile disk")),
    *_rows(
        DISK,
        STOCK,
        *(
            (name, "oned writes it")
            for name in (
                *("CLONE", "DATASTORE_ID", "DISK_ID", "DISK_TYPE", "IMAGE_ID", "ORIGINAL_SIZE", "PERSISTENT"),
                *("SAVE", "SIZE", "SOURCE", "TARGET", "TM_MAD", "TYPE"),
            )
        ),
        named=False,
    ),
    *_rows(
        DISK,
        DIFFERENT,
        *(
            (name, "read from the datastore, never from the disk, where a user may have written it")
            for name in ("CEPH_CONF", "CEPH_KEY", "CEPH_TRASH", "CEPH_USER", "POOL_NAME")
        ),
    ),
    *_rows(
        IMAGE,
        STOCK,
        ("FORMAT", "of an empty image, and of what is stored"),
        ("FS", "of an empty image"),
        ("MD5", "of the file as it comes"),
        ("PATH", "what is uploaded"),
        ("SHA1", "of the file as it comes"),
        ("SIZE", "of an empty image; the most that an upload may be"),
    ),
    *_rows(
        IMAGE,
        STOCK,
        ("CLONING_ID", "oned writes it"),
        ("DATASTORE_ID", "oned writes it"),
        ("PERSISTENT", "oned writes it"),
        ("SOURCE", "oned writes it"),
        ("TARGET_SNAPSHOT", "oned writes it"),
        ("TYPE", "oned writes it"),
        named=False,
    ),
    *_rows(
        IMAGE,
        DIFFERENT,
        ("MODTIME", "not read: which content a base has, its own hash says"),
        named=False,
    ),
    *_rows(
        IMAGE,
        NOTHING,
        ("VCENTER_ADAPTER_TYPE", VCENTER),
        ("VCENTER_DISK_TYPE", VCENTER),
        ("VCENTER_IMPORTED", VCENTER),
    ),
    *_rows(HOST, NOTHING, ("REPLICA_STORAGE_IP", REPLICA)),
    *_rows(
        VM,
        STOCK,
        *((f"BACKUPS/BACKUP_CONFIG/{name}", "as oned has it") for name in ("FS_FREEZE", "LAST_DATASTORE_ID")),
        ("BACKUPS/BACKUP_CONFIG/MODE", "full backups; an increment is refused by name"),
        *(
            (name, "as oned has it")
            for name in (
                *("DEPLOY_ID", "LCM_STATE", "CONTEXT/DISK_ID", "HISTORY_RECORDS/HISTORY"),
                *(f"HISTORY_RECORDS/HISTORY/{one}" for one in ("ACTION", "DS_ID", "HOSTNAME")),
                *(f"HISTORY_RECORDS/HISTORY/{one}" for one in ("TM_MAD", "VM_MAD")),
                *("SNAPSHOTS/SNAPSHOT", "SNAPSHOTS/SNAPSHOT/ACTIVE", "BACKUPS/BACKUP_CONFIG/LAST_BRIDGE"),
            )
        ),
        named=False,
    ),
    *_rows(
        VM,
        DIFFERENT,
        *(
            (f"BACKUPS/BACKUP_CONFIG/{name}", "every backup is a full one")
            for name in ("INCREMENT_MODE", "INTERACTIVE", "LAST_INCREMENT_ID")
        ),
        named=False,
    ),
    *_rows(
        CONFIGURATION,
        STOCK,
        ("BACKUP_BASE_PATH", "of `datastore.conf`: where hosts leave the disks of a backup"),
        (
            "FS_OPTS_*",
            "of `datastore.conf`: words for `mkfs`, also of a label; a plain value, nothing that bash would "
            "compute; a swap area has the label `swap`",
        ),
        ("SUPPORTED_FS", "of `datastore.conf`; of `ext2`, `ext3`, `ext4`, `xfs`, `btrfs`"),
    ),
    *_rows(
        CONFIGURATION,
        STOCK,
        ("CEPH_TRASH", "of `ceph.conf`: for datastores on Ceph that do not say it themselves"),
    ),
    *_rows(
        CONFIGURATION,
        DIFFERENT,
        (
            "QCOW2_OPTIONS",
            "of `tmrc`: `-o` of overlays on hosts, if `options` in `semishared.conf` is `by-size`; nothing "
            "that names other files, a size or encryption",
        ),
    ),
    *_rows(
        CONFIGURATION,
        REFUSED,
        (
            "POOL_NAME",
            "of `ceph.conf`: a datastore on Ceph that names no pool has its images in `one`; no new image is "
            "made on it while the file names another one",
        ),
        harmless="one",
    ),
    *_rows(CONFIGURATION, NOTHING, ("STAGING_DIR", "nothing is staged on a bridge"), harmless="/var/tmp"),
    *_rows(
        CONFIGURATION,
        NOTHING,
        ("DD_BLOCK_SIZE", "nothing is copied by `dd`: extents have 1 MiB"),
        harmless="64k",
    ),
    *_rows(CONFIGURATION, NOTHING, ("RBD_FORMAT", "images made here have format 2"), harmless="2"),
    *_rows(
        CONFIGURATION,
        NOTHING,
        ("ZERO_LVM_ON_CREATE", LVM),
        ("ZERO_LVM_ON_DELETE", LVM),
    ),
)
"""Every name that stock's scripts read, and DISK_TYPE of a datastore, which oned hands on."""


def refusable() -> frozenset[str]:
    """Return the names that an action may refuse."""
    return frozenset(row.name for row in ROWS if row.verdict == REFUSED and row.of != CONFIGURATION)


def refuse(of: str, holder: str, template: Mapping[str, str]) -> None:
    """Raise BadAttribute for the first attribute of a template that cannot work here."""
    for row in said(of, template):
        if row.verdict == REFUSED:
            raise BadAttribute(row.words(holder, template[row.name]))


def said(of: str, template: Mapping[str, str]) -> Iterable[Row]:
    """Yield the rows of what a template says in vain."""
    for row in ROWS:
        if row.of == of and row.is_said(template.get(row.name, "")) and not _is_met(row, template):
            yield row


def _is_met(row: Row, template: Mapping[str, str]) -> bool:
    """Tell whether what the attribute asks for is there: a marked store is seen to be mounted."""
    return row.name.startswith("NFS_AUTO_") and bool(template.get(STORE.name, "").strip())
