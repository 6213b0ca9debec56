# SPDX-License-Identifier: Apache-2.0
"""What libvirt is told about a VM's shares: the <filesystem> elements of its domain XML, and the memory that they need.

What oned writes there (7.2 and newer, LibVirtDriverKVM.cc) starts a daemon that is root of the host on Debian 12, whatever its <idmap>
says, which libvirt before 10.0 does not look at; and lets guests believe for ever what they once have seen (cache mode `always`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ..errors import BadArguments, BadAttribute, NotSupported
from ..named import NamedTuple
from ..opennebula.args import absolute
from ..opennebula.xml_edit import Element, Markup, escape
from .domain_xml import DRIVER

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,35}\Z")
"""virtio-fs has 36 bytes for it; what else oned lets its users write there is only good for trouble."""
MEMORY = "<source type='memfd'/><access mode='shared'/>"
"""The daemon reads and writes the guest's memory."""


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
    """Return the disks in `vm.xml` that are directories of our datastores; raise BadAttribute, BadArguments."""
    return [_attached(disk) for disk in _directories(Markup(vm, "VM").root)]


def _directories(vm: Element) -> Iterator[Element]:
    for disk in vm.find("TEMPLATE", "DISK"):
        if disk.value("TYPE") == "FILESYSTEM" and disk.value("TM_MAD") == DRIVER:
            yield disk


def _attached(disk: Element) -> Attached:
    number, image, tag = disk.value("DISK_ID"), disk.value("IMAGE_ID"), disk.value("MOUNT_TAG")
    if not number.isdigit() or not image.isdigit():
        raise BadArguments(f"a directory among the VM's disks has DISK_ID {number!r} and IMAGE_ID {image!r}")
    if not TAG.match(tag):
        raise BadAttribute(f"MOUNT_TAG of disk {number} is {tag!r}: it is 1 to 36 letters, digits, dots, dashes and underscores")
    is_exclusive = disk.value("PERSISTENT").upper() == "YES" and disk.value("SHAREABLE").upper() != "YES"
    readonly = disk.value("READONLY").upper() == "YES"
    return Attached(int(number), int(image), absolute(disk.value("SOURCE"), "SOURCE"), tag, readonly, is_exclusive)


def given(text: bytes, shares: Sequence[Attached], programs: Mapping[int, str]) -> bytes:
    """Return the domain XML in which each of `shares` is given to the guest by its program, of `programs` by disk."""
    markup = Markup(text, "domain")
    elements = {_named(element): element for element in markup.root.find("devices", "filesystem")}
    for share in shares:
        element = elements.get((share.source, share.tag))
        if element is None:
            raise BadArguments(f"disk {share.disk} is {share.source} with tag {share.tag} in vm.xml, and nowhere in the domain XML")
        markup.replace(element, _element(share, programs[share.disk]))
    _share_memory(markup)
    return markup.result()


def _named(element: Element) -> tuple[str, str]:
    source, target = element.first("source"), element.first("target")
    return source.attributes.get("dir", "") if source else "", target.attributes.get("dir", "") if target else ""


def _element(share: Attached, program: str) -> str:
    """Return the element: no <idmap> and no <readonly/>, which the program sees to, and the daemon's own cache mode (auto: for a second).

    Locks of one guest alone need no daemon. Those of several have to be the host's, where QEMU's daemon refuses to wait for one.
    """
    locks = "" if share.alone else "<lock posix='on' flock='on'/>"
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
        raise NotSupported("the VM's <memoryBacking> does not say <access mode='shared'/>, without which a guest has no share")
