# SPDX-License-Identifier: Apache-2.0
"""What oned keeps, and the XML it serves of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence, Tuple
from xml.sax.saxutils import escape

from .states import Img
from .template import Template, Vector, cdata, render, vectors

_OWNER = "<UID>0</UID><GID>0</GID><UNAME>oneadmin</UNAME><GNAME>oneadmin</GNAME>"


def _owner(uid: int) -> str:
    """Return the owner of an object that may be another user's than oneadmin's."""
    return _OWNER if not uid else f"<UID>{uid}</UID><GID>1</GID><UNAME>user{uid}</UNAME><GNAME>users</GNAME>"


DISK_TYPES = (
    "FILE",
    "CDROM",
    "BLOCK",
    "RBD",
    "RBD_CDROM",
    "GLUSTER",
    "GLUSTER_CDROM",
    "SHEEPDOG",
    "SHEEPDOG_CDROM",
    "ISCSI",
    "FILESYSTEM",
)
"""By number."""


def now() -> int:
    """Return the time as oned stamps it."""
    return int(time.time())


def _permissions(group_use: int = 0) -> str:
    bits = [("OWNER", "110"), ("GROUP", f"{group_use}00"), ("OTHER", "000")]
    inner = "".join(
        f"<{who}_{what}>{bit}</{who}_{what}>" for who, row in bits for what, bit in zip("UMA", row)
    )
    return f"<PERMISSIONS>{inner}</PERMISSIONS>"


def _ids(name: str, ids: Sequence[int]) -> str:
    return f"<{name}>" + "".join(f"<ID>{item}</ID>" for item in ids) + f"</{name}>"


def _plain(pairs: Sequence[Tuple[str, object]]) -> str:
    return "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in pairs)


@dataclass
class Datastore:
    """An image or a system datastore; TYPE 0 or 1."""

    id: int
    name: str
    type: int
    ds_mad: str
    tm_mad: str
    base_path: str
    template: Template
    images: List[int] = field(default_factory=list)
    total_mb: int = 0
    free_mb: int = 0
    used_mb: int = 0
    clusters: List[int] = field(default_factory=lambda: [0])
    known_type: int = 0
    """What DISK_TYPE was when the template had one."""

    @property
    def disk_type(self) -> int:
        """The number of DISK_TYPE, what oned does not know being a file; kept when the template loses it."""
        name = self.template.get("DISK_TYPE", "")
        if name:
            self.known_type = DISK_TYPES.index(name) if name in DISK_TYPES else 0
        return self.known_type

    def to_xml(self) -> str:
        """Return what one.datastore.info serves."""
        return (
            f"<DATASTORE><ID>{self.id}</ID>{_OWNER}{_plain([('NAME', self.name)])}{_permissions(1)}"
            f"<DS_MAD>{cdata(self.ds_mad)}</DS_MAD><TM_MAD>{cdata(self.tm_mad)}</TM_MAD>"
            f"<BASE_PATH>{cdata(self.base_path)}</BASE_PATH><TYPE>{self.type}</TYPE>"
            f"<DISK_TYPE>{self.disk_type}</DISK_TYPE><STATE>0</STATE>{_ids('CLUSTERS', self.clusters)}"
            f"<TOTAL_MB>{self.total_mb}</TOTAL_MB><FREE_MB>{self.free_mb}</FREE_MB>"
            f"<USED_MB>{self.used_mb}</USED_MB>{_ids('IMAGES', self.images)}"
            f"<TEMPLATE>{render(self.template)}</TEMPLATE></DATASTORE>"
        )


def fresh_snapshots() -> Template:
    """Return the snapshot list of an image nobody has used yet."""
    return {"ALLOW_ORPHANS": "NO", "CURRENT_BASE": "-1", "NEXT_SNAPSHOT": "0"}


@dataclass
class Image:
    """An image; TYPE 0 OS, 1 CDROM, 2 DATABLOCK, 7 FILESYSTEM."""

    id: int
    name: str
    type: int
    persistent: bool
    datastore_id: int
    datastore: str
    template: Template
    path: str = ""
    source: str = ""
    format: str = ""
    fs: str = ""
    disk_type: int = (
        0  # of the datastore when the image was made; what the datastore says later changes nothing
    )
    size: int = 0
    state: int = Img.LOCKED
    prev_state: int = Img.INIT
    cloning_id: int = -1
    target_snapshot: int = -1
    vms: List[int] = field(default_factory=list)
    snapshots: Template = field(default_factory=fresh_snapshots)
    regtime: int = field(default_factory=now)
    modtime: int = 0
    uid: int = 0
    increments: Dict[int, str] = field(default_factory=dict)
    """Of a backup: by number, how its driver calls them."""

    def __post_init__(self) -> None:
        self.modtime = self.modtime or self.regtime

    def set_state(self, state: int) -> None:
        """Change the state; oned keeps the previous one equal once the change is stored."""
        self.state = self.prev_state = state

    def to_xml(self) -> str:
        """Return what one.image.info serves."""
        increments = "".join(
            f"<INCREMENT><ID>{number}</ID><SOURCE>{cdata(name)}</SOURCE></INCREMENT>"
            for number, name in self.increments.items()
        )
        return (
            f"<IMAGE><ID>{self.id}</ID>{_owner(self.uid)}{_plain([('NAME', self.name)])}{_permissions()}"
            f"<TYPE>{self.type}</TYPE><DISK_TYPE>{self.disk_type}</DISK_TYPE>"
            f"<PERSISTENT>{int(self.persistent)}</PERSISTENT>"
            f"<REGTIME>{self.regtime}</REGTIME><MODTIME>{self.modtime}</MODTIME>"
            f"<SOURCE>{cdata(self.source)}</SOURCE><PATH>{cdata(self.path)}</PATH>"
            f"<FORMAT>{cdata(self.format)}</FORMAT><FS>{cdata(self.fs)}</FS><SIZE>{self.size}</SIZE>"
            f"<STATE>{self.state}</STATE><PREV_STATE>{self.prev_state}</PREV_STATE>"
            f"<RUNNING_VMS>{len(self.vms)}</RUNNING_VMS><CLONING_OPS>0</CLONING_OPS>"
            f"<CLONING_ID>{self.cloning_id}</CLONING_ID>"
            f"<TARGET_SNAPSHOT>{self.target_snapshot}</TARGET_SNAPSHOT>"
            f"<DATASTORE_ID>{self.datastore_id}</DATASTORE_ID>{_plain([('DATASTORE', self.datastore)])}"
            f"{_ids('VMS', self.vms)}<CLONES></CLONES><APP_CLONES></APP_CLONES>"
            f"<TEMPLATE>{render(self.template)}</TEMPLATE><SNAPSHOTS>{render(self.snapshots)}</SNAPSHOTS>"
            f"<BACKUP_INCREMENTS>{increments}</BACKUP_INCREMENTS><BACKUP_DISK_IDS></BACKUP_DISK_IDS></IMAGE>"
        )


@dataclass
class Host:
    """A hypervisor host."""

    id: int
    name: str
    vm_mad: str
    template: Template = field(default_factory=dict)
    state: int = 2
    cluster: int = 0
    free_mb: Dict[int, int] = field(default_factory=dict)
    """By system datastore, what its monitoring says is free there; of others there is enough."""

    def to_xml(self) -> str:
        """Return what one.host.info serves, as far as a driver may care."""
        return (
            f"<HOST><ID>{self.id}</ID>{_plain([('NAME', self.name)])}<STATE>{self.state}</STATE><PREV_STATE>2</PREV_STATE>"  # noqa: E501
            f"<IM_MAD>{cdata(self.vm_mad)}</IM_MAD><VM_MAD>{cdata(self.vm_mad)}</VM_MAD>"
            f"<CLUSTER_ID>{self.cluster}</CLUSTER_ID><CLUSTER>default</CLUSTER><VMS></VMS><TEMPLATE>{render(self.template)}</TEMPLATE></HOST>"
        )


@dataclass
class History:
    """One stay of a VM on a host and system datastore."""

    oid: int
    seq: int
    host: Host
    tm_mad: str
    ds_id: int
    stime: int = field(default_factory=now)
    etime: int = 0
    pstime: int = 0
    petime: int = 0
    rstime: int = 0
    retime: int = 0
    estime: int = 0
    eetime: int = 0
    action: int = 0
    uid: int = -1
    request_id: int = -1
    plan_id: int = -2
    action_id: int = -1

    def placed_by_scheduler(self) -> None:
        """Mark the record as a placement of the scheduler's."""
        self.plan_id, self.action_id = -1, 0

    def to_xml(self) -> str:
        """Return one HISTORY element."""
        return (
            f"<HISTORY><OID>{self.oid}</OID><SEQ>{self.seq}</SEQ>{_plain([('HOSTNAME', self.host.name)])}"
            f"<HID>{self.host.id}</HID><CID>{self.host.cluster}</CID>"
            f"<STIME>{self.stime}</STIME><ETIME>{self.etime}</ETIME>"
            f"<VM_MAD>{cdata(self.host.vm_mad)}</VM_MAD><TM_MAD>{cdata(self.tm_mad)}</TM_MAD>"
            f"<DS_ID>{self.ds_id}</DS_ID><PLAN_ID>{self.plan_id}</PLAN_ID><ACTION_ID>{self.action_id}</ACTION_ID>"
            f"<PSTIME>{self.pstime}</PSTIME><PETIME>{self.petime}</PETIME>"
            f"<RSTIME>{self.rstime}</RSTIME><RETIME>{self.retime}</RETIME>"
            f"<ESTIME>{self.estime}</ESTIME><EETIME>{self.eetime}</EETIME><ACTION>{self.action}</ACTION>"
            f"<UID>{self.uid}</UID><GID>{self.uid}</GID><REQUEST_ID>{self.request_id}</REQUEST_ID></HISTORY>"
        )


@dataclass
class Vm:
    """A virtual machine."""

    id: int
    name: str
    template: Template
    user_template: Template
    state: int
    lcm: int = 0
    stime: int = field(default_factory=now)
    etime: int = 0
    deploy_id: str = ""
    history: List[History] = field(default_factory=list)
    snapshots: Dict[int, Template] = field(default_factory=dict)
    resched: bool = False

    @property
    def disks(self) -> List[Vector]:
        """The DISK vectors, in order."""
        return vectors(self.template, "DISK")

    def disk(self, disk_id: int) -> Optional[Vector]:
        """Return one DISK vector."""
        return next((disk for disk in self.disks if disk["DISK_ID"] == str(disk_id)), None)

    @property
    def last(self) -> History:
        """The current history record."""
        return self.history[-1]

    def to_xml(self, only_last: bool = False) -> str:
        """Return what one.vm.info serves, or with the last record only what driver messages hold."""
        records = self.history[-1:] if only_last else self.history
        history = "".join(record.to_xml() for record in records)
        history = f"<HISTORY_RECORDS>{history}</HISTORY_RECORDS>" if history else "<HISTORY_RECORDS/>"
        snapshots = "".join(
            f"<SNAPSHOTS>{render(dict(self.snapshots[disk], DISK_ID=str(disk)))}</SNAPSHOTS>"
            for disk in sorted(self.snapshots)
        )
        return (
            f"<VM><ID>{self.id}</ID>{_OWNER}{_plain([('NAME', self.name)])}{_permissions()}"
            f"<LAST_POLL>0</LAST_POLL><STATE>{self.state}</STATE><LCM_STATE>{self.lcm}</LCM_STATE>"
            f"<PREV_STATE>{self.state}</PREV_STATE><PREV_LCM_STATE>{self.lcm}</PREV_LCM_STATE>"
            f"<RESCHED>{int(self.resched)}</RESCHED><STIME>{self.stime}</STIME><ETIME>{self.etime}</ETIME>"
            f"<DEPLOY_ID>{escape(self.deploy_id)}</DEPLOY_ID><MONITORING></MONITORING>"
            f"<SCHED_ACTIONS></SCHED_ACTIONS><TEMPLATE>{render(self.template)}</TEMPLATE>"
            f"<USER_TEMPLATE>{render(self.user_template)}</USER_TEMPLATE>{history}{snapshots}"
            "<BACKUPS><BACKUP_CONFIG/><BACKUP_IDS></BACKUP_IDS></BACKUPS></VM>"
        )
