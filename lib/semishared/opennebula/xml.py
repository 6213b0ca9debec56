# SPDX-License-Identifier: Apache-2.0
"""Views over the XML of OpenNebula: VM, disk, image, datastore, host. Values are read as oned reads them.

No logic beyond numbers, YES/NO, units and states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

from ..errors import BadArguments
from ..units import MiB
from .states import DatastoreState, DatastoreType, HostState, ImageType, LcmState, VmState
from .values import ID_BITS, decode, integer, is_yes, upper

if TYPE_CHECKING:
    from typing import Self, Sequence

Element = ElementTree.Element


def parse(text: str | bytes, root: str) -> Element:
    """Return the root element of `text`; raise BadArguments unless it is well-formed and called `root`."""
    try:
        element = ElementTree.fromstring(text)
    except (ElementTree.ParseError, LookupError, ValueError) as e:  # the latter two: odd encodings
        raise BadArguments(f"{root} XML does not parse: {e}") from None
    if element.tag != root:
        raise BadArguments(f"XML is <{element.tag}> where <{root}> belongs")
    return element


class View:
    """An element and the two ways to read from it."""

    def __init__(self, element: Element) -> None:
        self.element = element

    def text(self, path: str) -> str:
        """Return the text at `path` as it stands, '' if there is none."""
        return self.element.findtext(path) or ""

    def number(self, path: str, default: int = -1, bits: int = 64) -> int:
        """Return the number of so many bits that oned reads at `path`, `default` if it reads none."""
        found = integer(self.text(path), bits)
        return default if found is None else found

    def is_yes(self, path: str) -> bool:
        return is_yes(self.text(path))

    def fields(self, path: str = ".") -> dict[str, str]:
        """Return the texts of the elements below `path` by their names; none if there is no such path."""
        found = self.element.find(path)
        return {} if found is None else {child.tag: child.text or "" for child in found}

    def all(self, path: str) -> list[View]:
        return [View(element) for element in self.element.findall(path)]

    def to_bytes(self) -> bytes:
        data: bytes = ElementTree.tostring(self.element, encoding="utf-8")
        return data


class Text:
    """A property of a view: the text at a path."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, view: View, _kind: object) -> str:
        return view.text(self._path)


class Number:
    """A property of a view: the number of so many bits at a path, -1 without one."""

    def __init__(self, path: str, bits: int = 64) -> None:
        self._path, self._bits = path, bits

    def __get__(self, view: View, _kind: object) -> int:
        return view.number(self._path, bits=self._bits)


class Object(View):
    """What oned keeps in a pool under an id: a VM, an image, a datastore, a host."""

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        return cls(parse(text, cls.__name__.upper()))

    id = Number("ID", ID_BITS)
    name = Text("NAME")
    state = Number("STATE")

    def attribute(self, name: str) -> str:
        """Return one of our attributes in its template, without surrounding blanks; '' if it has none."""
        return self.text(f"TEMPLATE/{name}").strip()

    def attributes(self) -> dict[str, str]:
        """Return all of its template but vectors."""
        element = self.element.find("TEMPLATE")
        children = () if element is None else element
        return {child.tag: (child.text or "").strip() for child in children if len(child) == 0}


class Disk(View):
    """/VM/TEMPLATE/DISK.

    oned has overwritten what its objects have, and left what else the VM's user wrote: read what an image has
    from the image.
    """

    id = Number("DISK_ID", ID_BITS)

    @property
    def is_volatile(self) -> bool:
        """Tell whether oned acquired no image for it (VirtualMachineDisk::is_volatile)."""
        return self.type in ("FS", "SWAP")

    @property
    def type(self) -> str:
        return upper(self.text("TYPE"))

    @property
    def image_id(self) -> int:
        """Id of the image; -1 for a volatile disk, whatever its user has written."""
        return -1 if self.is_volatile else self.number("IMAGE_ID", bits=ID_BITS)

    image_name = Text("IMAGE")
    store_id = Number("DATASTORE_ID", ID_BITS)

    @property
    def source(self) -> str:
        return "" if self.is_volatile else self.text("SOURCE")

    @property
    def format(self) -> str:
        return (self.text("FORMAT") or self.text("DRIVER")).lower()

    @property
    def size(self) -> int:
        return max(self.number("SIZE", 0), 0) * MiB

    @property
    def original_size(self) -> int:
        return max(self.number("ORIGINAL_SIZE", 0), 0) * MiB

    @property
    def is_clone(self) -> bool:
        """Tell whether oned makes it by clone, and not by ln; oned writes that for each disk of an image."""
        return self.is_yes("CLONE")

    @property
    def is_readonly(self) -> bool:
        return self.is_yes("READONLY")

    @property
    def is_directory(self) -> bool:
        """A directory for the guest: the VM's directory has no file of it to make, move or remove."""
        return self.text("TYPE") == "FILESYSTEM"

    driver = Text("TM_MAD")
    target = Text("TARGET")
    """Name of the device in the guest."""
    mount_tag = Text("MOUNT_TAG")

    @property
    def file_system(self) -> str:
        return self.text("FS").lower()

    luks_secret = Text("LUKS_SECRET")
    """UUID of the libvirt secret that decrypts the disk, '' for none (plan/image/placement.py)."""


class Vm(Object):
    """/VM as one.vm.info serves it."""

    @property
    def history(self) -> list[View]:
        """The history records, oldest first."""
        return self.all("HISTORY_RECORDS/HISTORY")

    lcm_state = Number("LCM_STATE")

    @property
    def is_active(self) -> bool:
        """Tell whether it may have a guest."""
        return self.state == VmState.ACTIVE

    @property
    def is_running(self) -> bool:
        """Tell whether its guest runs and no action of oned is under way."""
        return self.is_active and self.lcm_state == LcmState.RUNNING

    @property
    def has_failed(self) -> bool:
        """Tell whether an action of oned has failed and waits for `onevm recover`."""
        return self.is_active and self.lcm_state in LcmState.FAILURES

    @property
    def is_on_front_end(self) -> bool:
        """Tell whether its files are on the front-end."""
        return self.state in (VmState.STOPPED, VmState.UNDEPLOYED)

    @property
    def has_left(self) -> bool:
        """Tell whether its files have left the host of the last history record, as those of a VM at rest.

        oned ends a record with the epilog, of whatever kind; one of a VM on its host is not ended.
        """
        return self.number("HISTORY_RECORDS/HISTORY[last()]/ETIME") > 0

    @property
    def is_on_no_host(self) -> bool:
        """Tell whether its disks come to a host only when it is deployed."""
        return self.is_on_front_end or self.state in (VmState.PENDING, VmState.HOLD)

    seq = Number("HISTORY_RECORDS/HISTORY[last()]/SEQ")
    """SEQ of the last history record, -1 without one: the one counter that never goes back."""

    def seq_on(self, host: str) -> int:
        """Return the SEQ of its last history record on a host, that of its last one if it was never there.

        An action that oned began there before the VM left has that SEQ, however late it asks.
        """
        there = (record.number("SEQ") for record in self.history if record.text("HOSTNAME") == host)
        return max(there, default=self.seq)

    host = Text("HISTORY_RECORDS/HISTORY[last()]/HOSTNAME")
    """Name of the host of the last history record, '' before the first deployment."""

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts of all history records, oldest first."""
        return [record.text("HOSTNAME") for record in self.history]

    @property
    def host_ids(self) -> list[int]:
        """Ids of the same hosts: oned knows a host by its id, while names change and are used again."""
        return [record.number("HID", bits=ID_BITS) for record in self.history]

    deploy_id = Text("DEPLOY_ID")

    @property
    def disks(self) -> list[Disk]:
        return [Disk(element) for element in self.element.findall("TEMPLATE/DISK")]

    def disk(self, disk_id: int) -> Disk:
        """Return disk `disk_id`; raise BadArguments if the VM has none such."""
        for disk in self.disks:
            if disk.id == disk_id:
                return disk
        raise BadArguments(f"VM {self.id} has no disk {disk_id}")

    def snapshots_of(self, disk_id: int) -> tuple[int, ...]:
        lists = [one.all("SNAPSHOT") for one in self.all("SNAPSHOTS") if one.number("DISK_ID") == disk_id]
        return tuple(sorted(row.number("ID") for rows in lists for row in rows))

    def backup_setting(self, name: str) -> str:
        """Return a setting of BACKUP_CONFIG, in upper case."""
        return self.text(f"BACKUPS/BACKUP_CONFIG/{name}").upper()

    @property
    def backup_ids(self) -> tuple[int, ...]:
        """Return the ids of the backup images that the VM has."""
        return tuple(one.number(".") for one in self.all("BACKUPS/BACKUP_IDS/ID"))

    context_disk = Number("TEMPLATE/CONTEXT/DISK_ID")
    """Disk id of the context ISO, -1 without one."""

    @property
    def system_datastores(self) -> list[int]:
        """Ids of the system datastores of all history records, oldest first."""
        return [record.number("DS_ID") for record in self.history]

    @property
    def driver(self) -> str:
        """TM_MAD of the last history record, '' without one: the driver that moves and removes its disks.

        Its datastore may have another one by now.
        """
        records = self.history
        return records[-1].text("TM_MAD") if records else ""

    def datastore_at(self, seq: int) -> int:
        """Return the id of the system datastore at a SEQ of the history, -1 if there is no such."""
        return next((record.number("DS_ID") for record in self.history if record.number("SEQ") == seq), -1)


class Image(Object):
    """/IMAGE."""

    type = Number("TYPE")
    """An ImageType."""

    @property
    def is_disk(self) -> bool:
        """Tell whether guests may write to disks of it."""
        return self.type in (ImageType.OS, ImageType.DATABLOCK)

    @property
    def is_persistent(self) -> bool:
        return self.number("PERSISTENT") == 1

    @property
    def is_readonly(self) -> bool:
        """For oned, DISK of a VM comes before it, unless PERSISTENT_TYPE says so."""
        return self.is_yes("TEMPLATE/READONLY") or self._persistent_type == "IMMUTABLE"

    @property
    def is_shareable(self) -> bool:
        """Tell whether several guests may write to it at once."""
        return self.is_persistent and self._persistent_type == "SHAREABLE" and self.format in ("raw", "dir")

    @property
    def _persistent_type(self) -> str:
        return upper(self.text("TEMPLATE/PERSISTENT_TYPE"))

    @property
    def backup_parts(self) -> frozenset[str]:
        """Return the backup driver's names of a backup's increments."""
        parts = [one.text("SOURCE") for one in self.all("BACKUP_INCREMENTS/INCREMENT")]
        return frozenset([*parts, self.source])

    def may_be_used_by(self, other: Image) -> bool:
        """Tell whether permissions (not oned's ACL) let the owner of another image use this one."""
        uid, gid = other.number("UID"), other.number("GID")
        rights = {
            "OWNER_U": uid == self.number("UID"),
            "GROUP_U": gid == self.number("GID"),
            "OTHER_U": True,
        }
        given = (self.number(f"PERMISSIONS/{right}") == 1 for right, is_so in rights.items() if is_so)
        return 0 in (uid, gid) or any(given)

    @property
    def vms(self) -> frozenset[int]:
        """Return the ids of the VMs that oned has acquired it for."""
        return frozenset(found.number(".", bits=ID_BITS) for found in self.all("VMS/ID"))

    source = Text("SOURCE")
    path = Text("PATH")
    store_id = Number("DATASTORE_ID")

    @property
    def format(self) -> str:
        return self.text("FORMAT").lower()

    @property
    def size(self) -> int:
        return max(self.number("SIZE", 0), 0) * MiB

    @property
    def file_system(self) -> str:
        return self.text("FS").lower()

    @property
    def luks_secret(self) -> str:
        return self.attribute("LUKS_SECRET")


class Datastore(Object):
    """/DATASTORE."""

    type = Number("TYPE")
    """A DatastoreType."""

    @property
    def is_system(self) -> bool:
        return self.type == DatastoreType.SYSTEM_DS

    driver = Text("TM_MAD")
    """Name of its transfer driver."""
    base_path = Text("BASE_PATH")
    disk_type = Number("DISK_TYPE")
    """Number of DISK_TYPE that oned keeps beside the template (Image.h), -1 without one."""

    @property
    def is_enabled(self) -> bool:
        """Tell whether the scheduler may choose it."""
        return self.state != DatastoreState.DISABLED

    @property
    def has_images(self) -> bool:
        return self.element.find("IMAGES/ID") is not None

    @property
    def store_driver(self) -> str:
        return self.text("DS_MAD").lower()

    @property
    def clusters(self) -> list[int]:
        return [found.number(".") for found in self.all("CLUSTERS/ID")]


class Host(Object):
    """/HOST."""

    @property
    def is_offline(self) -> bool:
        """Tell whether an operator has taken the host out."""
        return self.state == HostState.OFFLINE

    @property
    def is_monitored(self) -> bool:
        return self.state in (HostState.MONITORING_MONITORED, HostState.MONITORED)

    @property
    def reserved_memory(self) -> int:
        """Return the bytes of memory that oned gives to no VM (RESERVED_MEM); -1 if unknown."""
        total, most = (self.number(f"HOST_SHARE/{name}") for name in ("TOTAL_MEM", "MAX_MEM"))
        return (total - most) << 10 if total > 0 and most >= 0 else -1

    cluster = Text("CLUSTER")
    cluster_id = Number("CLUSTER_ID")

    @property
    def told_addresses(self) -> list[str]:
        """Return the words by which its probe has told its addresses last; a host may say anything."""
        return self.text("TEMPLATE/SEMISHARED/ADDRESSES").split()

    def is_near(self, datastores: Sequence[Datastore]) -> bool:
        """Tell whether VMs with disks in these may run here: a datastore without clusters is near to all."""
        if self.text("VM_MAD").lower() == "lxc":
            return False
        return not datastores or any(
            not store.clusters or self.cluster_id in store.clusters for store in datastores
        )


class DriverData:
    """Standard input of a datastore action, DS_DRIVER_ACTION_DATA: its image and its datastore.

    Raise BadArguments if that cannot be read.
    """

    def __init__(self, data: bytes) -> None:
        self.view = View(parse(decode(data), "DS_DRIVER_ACTION_DATA"))

    def _part(self, name: str) -> Element:
        element = self.view.element.find(name)
        return ElementTree.Element(name) if element is None else element

    @property
    def image(self) -> Image:
        return Image(self._part("IMAGE"))

    @property
    def datastore(self) -> Datastore:
        return Datastore(self._part("DATASTORE"))

    @property
    def has_source_bridges(self) -> bool:
        """Tell whether a clone's original is in another datastore, which has a BRIDGE_LIST (from 7.4 on)."""
        return bool(self.view.text("SOURCE_BRIDGE_LIST"))
