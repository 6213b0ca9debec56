# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of plans: what can be done on a host, as data.

A plan is a list of steps for one machine. Steps cross ssh as JSON (`to_data`, `from_data`), never as shell
text. Sizes are bytes; paths are absolute.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from ..errors import BadArguments
from ..named import Named
from .disk import snapshot_steps
from .disk.snapshot_steps import *  # noqa: F403
from .disk.snapshot_steps import Rested
from .refs import DiskRef as DiskRef
from .refs import ImageRef as ImageRef
from .refs import Step as Step
from .refs import is_look as is_look
from .store.access import Access as Access
from .store.access import pool_and_name as pool_and_name
from .vm import move_steps
from .vm.move_steps import *  # noqa: F403 - the vocabulary is one, in files of a size to read

if TYPE_CHECKING:
    from typing import Optional, Union  # noqa: F401 - answers in quotes

    from .disk.snapshot_steps import OnStore  # noqa: F401
    from .shapes import Generation


class State(enum.Enum):
    """A libvirtd's word about a domain (guest/domain.state)."""

    RUNNING = "running"
    PAUSED = "paused"
    OFF = "off"
    ABSENT = "absent"
    UNKNOWN = "unknown"


class PrepareVm(Step[None]):
    """Make the VM directory and mark its datastore as ours (`.monitor`)."""

    vm: int
    vm_dir: str


class ReplaceLostBases(Step[None]):
    """Make the bases of the VM's disks again that were on a device which is gone.

    Also their copies in memory, for disks whose guest reads from one.
    """

    vm: int
    vm_dir: str


class StagedBase(Named):
    """The base that is there."""

    generation: Generation
    snapshot: int = -1
    """What NameGeneration is to name, -1 if it has its name."""


class StageBase(Step[StagedBase]):
    """Have a verified base of the image in the host's base store `root`."""

    root: str
    image: ImageRef


class CreateOverlay(Step[None]):
    """Publish a qcow2 overlay over the staged base as the VM's disk, with a lease on the base."""

    disk: DiskRef
    image: ImageRef
    min_size: int
    options: str


class CreateRemote(Step[None]):
    """Publish a qcow2 overlay over the image on its store (over `snapshot` of it, where it has a bridge) as
    the VM's disk.
    """

    disk: DiskRef
    image: ImageRef
    min_size: int
    options: str
    snapshot: str = ""


class CopyImage(Step[None]):
    """Publish a verified full copy of the image as the VM's disk."""

    disk: DiskRef
    image: ImageRef
    min_size: int


class CopyFile(Step[None]):
    """Publish a plain copy of a file (kernel, initrd)."""

    source: str
    path: str
    vm: int


class CloneOnStore(Step[None]):
    """Publish a copy-on-write clone beside the image on the store, and a link to it as the VM's disk."""

    disk: DiskRef
    image: ImageRef
    min_size: int


class LinkInPlace(Step[None]):
    """Link the VM's disk to the image; `session` first ends its generation, unless a guest writes to it."""

    disk: DiskRef
    image: ImageRef
    readonly: bool
    session: bool
    shareable: bool = False
    """Whether other guests may write to it too."""


class CreateVolatile(Step[None]):
    """Publish an empty disk, with a file system if one is named, or a swap area (`fs` = swap)."""

    disk: DiskRef
    size: int
    format: str
    fs: str
    fs_options: tuple[str, ...] = ()
    """Words for mkfs, by the site (front/stock_conf.py)."""


class NoteIoClasses(Step[None]):
    """Note the I/O class of each of `disks` of the VM; one without a record is passed over."""

    vm: int
    vm_dir: str
    disks: tuple[int, ...]
    classes: tuple[str, ...]


class NoteClients(Step[None]):
    """Note of which of its shares, by disk, the VM's guest itself is a client: deploy gives it none of those.
    And what its others are.
    """

    vm: int
    vm_dir: str
    disks: tuple[int, ...]
    roots: dict[str, Any]
    """Of each share that the VM's host gives, by image: marker of the root, when the image was made, as oned
    has it, and True if its image is read-only.
    """


class ReceiveFile(Step[None]):
    """Publish a file whose bytes follow the plan."""

    path: str
    vm: int
    size: int
    sha256: str


class EndedSession(Named):
    """What has become of a disk that was in place."""

    commits: bool = False
    """It is a diff, and still there."""
    kept: str = ""
    """Where what was not committed is kept."""


class RemovedDisk(Named):
    """A disk that is gone."""

    kept: str = ""
    """Where what was not committed is kept."""


class RemovedVm(Named):
    """A VM directory that is gone."""

    kept: list[str]
    """Where what was not committed is kept."""


class EndSession(Step[EndedSession]):
    """Take an in-place disk from the VM; the image stays. A diff is only reported: `commits`."""

    disk: DiskRef


class RemoveDisk(Step["Union[OnStore, RemovedDisk]"]):
    """Remove a disk of a VM, its lease, and its clone on the store `store_dir` ('' if it has none)."""

    disk: DiskRef
    store_dir: str


class RemoveVm(Step[RemovedVm]):
    """Remove a VM directory and all leases of the VM."""

    vm: int
    vm_dir: str


class SaveDisk(Step[Rested]):
    """Publish an independent copy of a disk on the store; `domain` names the running VM ('' if it is off)."""

    disk: DiskRef
    path: str
    format: str
    domain: str
    snapshot: int = -1
    """The snapshot to save instead of the present content, -1 for none."""
    freeze: str = "NONE"
    """How the guest rests for the moment that is saved (guest/freeze.py)."""


class BackUp(Step[None]):
    """Leave a standalone qcow2 copy of each disk, as of one moment, and `xml` as vm.xml, in `directory`.

    Of an increment (`since`) a copy may have what has changed alone (model/disk/marks.py).
    """

    vm: int
    vm_dir: str
    directory: str
    disks: tuple[str, ...]
    domain: str
    """'' if the VM is off."""
    freeze: str
    xml: str
    nice: int = 0
    """How much less CPU priority the copies of a VM that is off have (nice(1))."""
    io_level: int = -1
    """Their level in the best-effort I/O class, 0 to 7; -1: the idle class."""
    rate: int = 0
    """Bytes per second at most of all copies together, 0 for no limit."""
    slice: str = ""
    """The slice of systemd's in which programs that copy run, where the host has one of oneadmin's."""
    limits: tuple[str, ...] = ()
    """Its properties, by systemd.resource-control(5); then `nice` and `io_level` are not gone by."""
    since: Optional[int] = None
    """The increment that is stored, -1 for none: what changed since is left, and the moment marked."""
    chain: int = -1
    """The backup image of that increment, -1 for none."""
    newest: int = -1
    """The highest id of a backup image that the VM has, -1 for none."""
    tpm: bool = False
    """Whether the state of the VM's TPM is left, too."""


class EndBackup(Step[None]):
    """End all work of a backup, and remove `directory`."""

    vm: int
    vm_dir: str
    directory: str
    domain: str


class RestoreDisk(Step[None]):
    """Give a disk the content of the qcow2 image whose bytes follow the plan; `min_size` is what the VM's
    disk has.
    """

    disk: DiskRef
    min_size: int


def look_instead(step: Step) -> Step:
    """Return the look that answers `step`, and what the step itself looks at; `step` if there is none."""
    if isinstance(step, snapshot_steps.DescribeDisk):
        return snapshot_steps.LookAtDisk(*step)
    return move_steps.LookAtVm(*step) if isinstance(step, move_steps.MarkVm) else step


_NESTED: dict[str, Any] = {"image": ImageRef, "disk": DiskRef, "access": Access}
STEPS: dict[str, Any] = {
    name: cls for name, cls in globals().items() if getattr(cls, "__base__", None) is Step
}


def _named(name: str) -> Any:
    if name not in STEPS:
        # What no transfer action plans is not loaded by any.
        from . import job_steps, leftover_steps
        from .base import steps as base_steps
        from .device import steps as device_steps
        from .disk import commit_steps, network_disk
        from .share import share
        from .share import steps as share_steps
        from .store import image_steps

        _NESTED.update(
            network=network_disk.NetworkDisk, parts=base_steps.Part, tree=share.Tree, share=share.Share
        )
        others = (base_steps, image_steps, commit_steps, device_steps, share_steps, leftover_steps, job_steps)
        for module in others:
            STEPS.update(
                {key: cls for key, cls in vars(module).items() if getattr(cls, "__base__", None) is Step}
            )
    return STEPS.get(name)


def to_data(step: Step) -> dict[str, object]:
    """Return `step` as JSON data."""
    data: dict[str, object] = {"step": type(step).__name__}
    for name, value in step._asdict().items():
        if name == "parts":
            value = [part.to_data() for part in value]
        data[name] = value.to_data() if hasattr(value, "to_data") else value
    return data


def from_data(data: dict[str, object]) -> Step:
    """Return the step in JSON `data`; raise BadArguments."""
    values = dict(data) if isinstance(data, dict) else {}
    cls = _named(str(values.pop("step", "")))
    if cls is None or set(values) != set(cls._fields):
        raise BadArguments(f"not a step: {str(data)[:200]}")
    for name, kind in _NESTED.items():
        if name in values:
            found = values[name]
            values[name] = (
                tuple(map(kind.from_data, found))
                if name == "parts" and isinstance(found, list)
                else kind.from_data(found)
            )
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    return cls(**values)  # type: ignore[no-any-return]
