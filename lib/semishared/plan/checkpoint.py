# SPDX-License-Identifier: Apache-2.0
"""The domain XML inside a checkpoint, brought to what has become of the disks since it was written."""

from __future__ import annotations

import posixpath
from typing import Optional, Union

from ..model import layout
from ..model.network_disk import NetworkDisk
from ..model.record import Record
from ..opennebula.xml_edit import Markup
from .backing import NO_CHAINS, Chains, lay_over
from .domain_xml import Records


def with_active_layers(domain: bytes, records: Records, chains: Chains = NO_CHAINS) -> bytes:
    """Return a checkpoint's domain XML with each disk at the layer that is active now, in its format, over what `chains` says.

    Snapshots were made, merged and deleted since, and of a disk that was attached to the running guest libvirt has not kept
    what it lies over. Local disks stay in the directory that the checkpoint names: the stock restore replaces that.
    """
    markup = Markup(domain, "domain")
    shared = {}
    for record in records.values():
        if record.path and not record.is_local:
            # Of a clone whichever layer, of a disk in place the image.
            shared[record.path.rpartition("/")[0] if record.place.backing == "store" else record.path] = record
    for disk in markup.root.find("devices", "disk"):
        source, driver = disk.first("source"), disk.first("driver")
        path = source.attributes.get("file", "") if source else ""
        local, here = _local(path), ("", "")
        found = _recorded(local, records) if local else shared.get(path) or shared.get(path.rpartition("/")[0])
        if found is None or source is None or driver is None:
            continue
        if local:
            plain = layout.disk(local.vm_dir, local.disk)
            markup.set_attribute(source, "file", found.active(plain))
            here = (found.path.rpartition("/")[0], layout.layers(plain)) if found.layer else here
        else:
            markup.set_attribute(source, "file", found.path)
        markup.set_attribute(driver, "type", found.format)
        chain = chains.get(found.disk)
        if chain is not None:
            lay_over(markup, disk, source, [(_moved(name, *here), format) for name, format in chain])
        else:
            for child in disk.all("backingStore"):
                markup.remove(child)
    return markup.result()


def _local(path: str) -> Optional[layout.DiskFile]:
    found = layout.disk_file(path)
    return found if found and layout.is_number(posixpath.basename(found.vm_dir)) else None


def _recorded(local: layout.DiskFile, records: Records) -> Optional[Record]:
    """Return the record of a local disk by its name and that of the VM's directory, whatever lies above."""
    record = records.get(local.disk)
    same = _local(record.path) if record and record.is_local else None
    is_same = same and same.disk == local.disk and posixpath.basename(same.vm_dir) == posixpath.basename(local.vm_dir)
    return record if is_same else None


def _moved(path: Union[str, NetworkDisk], was: str, now: str) -> Union[str, NetworkDisk]:
    if not isinstance(path, str):
        return path
    folder, _, name = path.rpartition("/")
    return f"{now}/{name}" if was and folder == was else path
