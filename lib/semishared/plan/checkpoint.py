# SPDX-License-Identifier: Apache-2.0
"""The domain XML inside a checkpoint, brought to what has become of the disks since it was written."""

from __future__ import annotations

import re
from typing import Optional

from ..model.record import Record
from ..opennebula.xml_edit import Markup
from .backing import NO_CHAINS, Chains, lay_over
from .domain_xml import Records

LOCAL = re.compile(r"/([0-9]+)/disk\.([0-9]{1,9})(\.snap/[0-9]+)?\Z")


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
        match, here = LOCAL.search(path), ("", "")
        found = _recorded(match, records) if match else shared.get(path) or shared.get(path.rpartition("/")[0])
        if found is None or source is None or driver is None:
            continue
        if match:
            plain = path[: match.end(2)]
            markup.set_attribute(source, "file", plain + found.layer)
            here = (found.path.rpartition("/")[0], f"{plain}.snap") if found.layer else here
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


def _recorded(match: re.Match[str], records: Records) -> Optional[Record]:
    """Return the record of a local disk by its name and that of the VM's directory, whatever lies above."""
    record = records.get(int(match.group(2)))
    same = LOCAL.search(record.path) if record and record.is_local else None
    return record if same and same.group(1, 2) == match.group(1, 2) else None


def _moved(path: str, was: str, now: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"{now}/{name}" if was and folder == was else path
