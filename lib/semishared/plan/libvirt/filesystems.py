# SPDX-License-Identifier: Apache-2.0
"""Write a VM's shares for libvirt: <filesystem> elements, and the shared memory that they need.

oned's own elements (7.2 and newer, LibVirtDriverKVM.cc) start a daemon that is root of the host on Debian 12,
whatever its <idmap> says, which libvirt before 10.0 ignores. They also let guests cache for ever what they
have once seen (cache mode `always`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

from ...errors import BadArguments, BadAttribute, BadRecord, NotSupported
from ...model.attributes import SHARE_ACCESS
from ...model.share import names as share_names
from ...named import NamedTuple
from ...opennebula.args import absolute
from ...opennebula.xml_edit import Element, Markup, escape
from .domain import DRIVER

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,35}\Z")
"""virtio-fs has 36 bytes for it; other characters that oned accepts are only good for trouble."""
MEMORY = "<source type='memfd'/><access mode='shared'/>"
"""The daemon reads and writes the guest's memory."""
NO_CONTEXT = (
    "disk {} is a share whose client the guest itself is to be (SEMISHARED_SHARE_ACCESS, when the "
    "VM was made), and without CONTEXT nobody "
    "tells it its key: make the VM anew, from a template with CONTEXT"
)


class Attached(NamedTuple):
    """A share among the disks of a VM, as vm.xml has it."""

    disk: int
    image: int
    source: str
    tag: str
    readonly: bool
    alone: bool
    """No other VM has it as long as this one does."""


def shares_of(vm: bytes) -> list[Attached]:
    """Return the disks in `vm.xml` that are directories of our datastores; raise BadAttribute, BadArguments.

    Raise NotSupported where a guest without CONTEXT is to be the client of one: oned calls no `context` then,
    so there is no key, and no note that the host gives it none. oned has copied the attribute when it made
    the VM (Attribute.is_inherited).
    """
    root = Markup(vm, "VM").root
    disks = list(_directories(root))
    for disk in [] if any(root.find("TEMPLATE", "CONTEXT")) else disks:
        if disk.value(SHARE_ACCESS.name).strip().lower() == "client":
            raise NotSupported(NO_CONTEXT.format(disk.value("DISK_ID")))
    return [_attached(disk) for disk in disks]


def _directories(vm: Element) -> Iterator[Element]:
    for disk in vm.find("TEMPLATE", "DISK"):
        if disk.value("TYPE") == "FILESYSTEM" and disk.value("TM_MAD") == DRIVER:
            yield disk


def _attached(disk: Element) -> Attached:
    number, image, tag = disk.number("DISK_ID"), disk.number("IMAGE_ID"), disk.value("MOUNT_TAG")
    if number is None or image is None or min(number, image) < 0:
        said = disk.value("DISK_ID"), disk.value("IMAGE_ID")
        raise BadArguments(
            "a directory among the VM's disks has DISK_ID {!r} and IMAGE_ID {!r}".format(*said)
        )
    check_tag(number, tag)
    is_exclusive = disk.is_yes("PERSISTENT") and not disk.is_yes("SHAREABLE")
    return Attached(
        number, image, absolute(disk.value("SOURCE"), "SOURCE"), tag, disk.is_yes("READONLY"), is_exclusive
    )


def check_tag(disk: int, tag: str) -> str:
    """Return the MOUNT_TAG of a disk; raise BadAttribute."""
    if not TAG.match(tag):
        raise BadAttribute(
            f"MOUNT_TAG of disk {disk} is {tag!r}: it is 1 to 36 letters, digits, dots, dashes "
            f"and underscores"
        )
    return tag


def given(
    text: bytes, shares: Optional[Sequence[Attached]], programs: Mapping[int, tuple[str, bool]]
) -> bytes:
    """Return the domain XML in which each of `shares` reaches the guest by its program.

    `programs`: by disk, the program, and whether the share stands for a directory that was there before; a
    share without one is left out. For any other directory that may be ours, oned has a daemon that is root of
    the host: raise BadRecord. `shares`: None if unknown. Directories of other drivers stay as they came.
    """
    markup = Markup(text, "domain")
    left = list(markup.root.find("devices", "filesystem"))
    for share in shares or ():
        same = [element for element in left if _named(element) == [(share.source, share.tag)]]
        if not same:
            raise BadArguments(
                f"disk {share.disk} is {share.source} with tag {share.tag} in vm.xml, and nowhere "
                f"in the domain XML"
            )
        if len(same) > 1:
            raise BadRecord(
                f"disk {share.disk} is {share.source} with tag {share.tag}, which the domain XML "
                f"has {len(same)} times"
            )
        if share.disk in programs:
            markup.replace(same[0], _element(share, *programs[share.disk]))
        else:
            markup.remove_line(same[0])
        left.remove(same[0])
    for element in left:
        _check_foreign(element, shares is not None)
    if programs:
        _share_memory(markup)
    return markup.result()


def _named(element: Element) -> list[tuple[str, str]]:
    """Return source and tag of a directory for the guest: one, but for XML that is not oned's."""
    targets = [target.attributes.get("dir", "") for target in element.all("target")] or [""]
    return [
        (source.attributes.get("dir", ""), target) for source in element.all("source") for target in targets
    ]


def _check_foreign(element: Element, is_known: bool) -> None:
    """Raise BadRecord for a directory in the domain XML that may be ours; `is_known`: vm.xml was read."""
    for source, _ in _named(element):
        if share_names.root_and_image(posixpath.normpath(source))[1] >= 0:
            raise BadRecord(
                f"{source} is called like a share, and vm.xml does not say that it is one of this VM's"
            )
    if not is_known and any(driver.attributes.get("type") == "virtiofs" for driver in element.all("driver")):
        raise BadRecord(
            "the domain XML has a directory for the guest, and whether it is a share cannot be "
            "told without vm.xml"
        )


def _element(share: Attached, program: str, is_registered: bool) -> str:
    """Return the element: without <idmap> and <readonly/>, which the program does, and with cache mode auto.

    Locks of one guest alone need no daemon. Locks of several have to be the host's, and QEMU's daemon refuses
    to wait for one. A registered directory counts as used by several: other images may be it, or be in it,
    and processes of hosts use it.
    """
    locks = "" if share.alone and not is_registered else "<lock posix='on' flock='on'/>"
    return (
        "<filesystem type='mount' accessmode='passthrough'><driver type='virtiofs' queue='1024'/>"
        f"<binary path='{escape(program)}' xattr='on'><sandbox mode='namespace'/>{locks}</binary>"
        f"<source dir='{escape(share.source)}'/><target dir='{escape(share.tag)}'/></filesystem>"
    )


def _share_memory(markup: Markup) -> None:
    backing = markup.root.first("memoryBacking")
    if backing is None:
        devices = markup.root.first("devices")
        assert devices is not None
        markup.insert_before(devices, f"<memoryBacking>{MEMORY}</memoryBacking>\n\t")
    elif [access.attributes.get("mode") for access in backing.all("access")] != ["shared"]:
        raise NotSupported(
            "the VM's <memoryBacking> does not say <access mode='shared'/>, without which a guest "
            "has no share"
        )
