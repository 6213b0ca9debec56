# SPDX-License-Identifier: Apache-2.0
"""What Sunstone shows of a VM's disks: one vector of its user template, and a line of its local images.

    VM      SEMISHARED = [ DISK0 = "overlay on h2, base image 7", DISK1 = "diff on h2, of image 9",
                           DETACHED = "yes", UNCOMMITTED = "12.0 MiB since 2026-11-28 01:24 UTC",
                           LAST_ERROR = "2026-11-28 01:20 UTC clone: SS010 h2 does not answer" ]
    image 9 SEMISHARED_STATE = "on h2, disk 1 of VM 12: 12.0 MiB not committed since 2026-11-28 01:24 UTC"

While a machine moves bytes for an action there is NOW = "copying disk 0: 41 %, 80.0 MiB/s from h3" beside
them. DETACHED is yes if no disk of the VM reads from a store. A time stands where an age might: an age is
wrong a minute later, and would have to be written again and again. Sunstone cuts values at about 85
characters.

Nothing of ours decides by this text: users may write it. It is in neither VM_RESTRICTED_ATTR nor
IMAGE_RESTRICTED_ATTR, for two reasons (OpenNebula 7.4.0, src/template/Template.cc:787):

- `VM_RESTRICTED_ATTR = "SEMISHARED"` restricts nothing. check_restricted looks a plain name up by
  get(name, string), which finds single attributes and no vector (line 311). It takes a line for each field,
  "SEMISHARED/DISK0".
- With these lines a user's Attributes panel breaks. Its form sends the whole user template in place of the
  old one (fireedge: resources/Tabs/Vm/Info/index.js:101, `replace: 0`). If we have published since the form
  was opened, the vector in it is an old one, and oned refuses all that the user has changed: "Tried to change
  restricted attribute: SEMISHARED". A single attribute of an image is refused in the same way.

USER_TEMPLATE/ERROR, the red banner, stays oned's. oned writes it when an action fails, and has no update that
depends on what is there: to clear ours might remove one that oned has written since.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Dict, Iterable, Iterator, Mapping, Optional

from ... import NAME
from ...model.attributes import STATE
from ...model.disk.place import COPY, DIFF, IN_PLACE, OVERLAY, PLACES, REMOTE_FIRST, STORE_CLONE, VOLATILE
from ...named import NamedTuple
from ...units import human

if TYPE_CHECKING:
    from ...model.base.steps import KeptDisk, ReportedDisk, ReportedVm
    from ...opennebula.xml import Disk, Image, Vm

ATTRIBUTE = NAME.upper()
NOW, FIELD = "NOW", r"[A-Z][A-Z0-9_]*"
"""The field of what is moved at this moment (front/now.py); a name of a field."""
LONGEST = 85
"""Characters of a value that Sunstone shows."""
LIVES = {
    OVERLAY: "overlay on {where}, base image {image}",
    DIFF: "diff on {where}, of image {image}",
    COPY: "copy on {where}, of image {image}",
    REMOTE_FIRST: "remote-first on {where}, reads image {image} on store {store}",
    VOLATILE: "volatile on {where}",
    IN_PLACE: "in place on store {store}",
    STORE_CLONE: "clone on store {store}, of image {image}",
}


class Facts(NamedTuple):
    """What is known of a VM: oned's word, and its machine's."""

    vm: Vm
    where: str
    """The machine that has its files."""
    seen: Optional[ReportedVm] = None
    """What that said; None: nothing."""
    why: str = ""
    """Why it said nothing."""
    is_settled: bool = True
    """No action of oned has failed half-way: then a disk that is not there is missing."""
    since: str = ""
    """Since when a local disk has what its image has not."""
    error: str = ""
    """What the last action of ours has failed with, '' if it has not."""

    @property
    def disks(self) -> Iterator[tuple[Disk, Optional[ReportedDisk]]]:
        """Yield the disks of ours, each with what the machine said of it."""
        there = {disk.disk: disk for disk in self.seen.disks} if self.seen else {}
        for disk in self.vm.disks:
            if disk.id in there or (disk.driver == NAME and not disk.is_directory):
                yield disk, there.get(disk.id)

    @property
    def uncommitted(self) -> int:
        """Bytes that local disks of persistent images have, and their images have not."""
        return sum(seen.uncommitted or 0 for _, seen in self.disks if seen)

    @property
    def may_change(self) -> bool:
        """Tell whether the guest alone, without any action, changes what is to be said."""
        return any(seen and seen.uncommitted is not None for _, seen in self.disks)


def vector(facts: Facts) -> Dict[str, str]:
    """Return the fields of the vector, {} for a VM without a disk of ours."""
    disks = list(facts.disks)
    found = {f"DISK{disk.id}": _lives(facts, disk, seen) for disk, seen in disks}
    if disks and facts.seen is not None and all(seen for _, seen in disks):
        found["DETACHED"] = _detached(facts)
        found["UNCOMMITTED"] = _uncommitted(facts.uncommitted, facts.since) or "no"
    if facts.error:
        found["LAST_ERROR"] = facts.error
    return {name: plain(text) for name, text in found.items()}


def _lives(facts: Facts, disk: Disk, seen: Optional[ReportedDisk]) -> str:
    """Return where a disk is; image and store are oned's words, of which the host's records say nothing."""
    if seen is None:
        return _why_unseen(facts, disk)
    place = PLACES.get(seen.how)
    if place is None:
        return f"of an unknown kind on {facts.where}"
    text = LIVES[place].format(where=facts.where, image=disk.image_id, store=disk.store_id)
    many = f", {seen.snapshots} snapshots" if seen.snapshots > 1 else ", 1 snapshot" if seen.snapshots else ""
    return text + many


def _why_unseen(facts: Facts, disk: Disk) -> str:
    if facts.seen is None:
        return f"on {facts.where}, not seen: {facts.why}"
    wrong = facts.seen.wrong.get(str(disk.id), "" if facts.seen.disks else facts.seen.error)
    if wrong:
        return f"cannot be read on {facts.where}: {wrong}"
    return f"no record on {facts.where}: semishared doctor" if facts.is_settled else f"not on {facts.where}"


def _detached(facts: Facts) -> str:
    """Return which disks keep the guest from running without a store."""
    reading = []
    for disk, seen in facts.disks:
        place = PLACES.get(seen.how) if seen else None
        if place is None or not place.is_local or place.is_remote:
            reading.append(disk)
    if not reading:
        return "yes"
    numbers = " ".join(str(disk.id) for disk in reading)
    stores = " ".join(sorted({str(disk.store_id) for disk in reading}))
    return f"no: disk{'s' * (len(reading) > 1)} {numbers} on store {stores}"


def _uncommitted(size: int, since: str) -> str:
    return f"{human(size)} since {since}" if size and since else human(size) if size else ""


def image_states(facts: Facts) -> Dict[int, str]:
    """Return the lines of images of which a disk of the VM is the newest content, by image."""
    found = {}
    for disk, seen in facts.disks:
        if seen and seen.uncommitted is not None:
            size = _uncommitted(seen.uncommitted, facts.since).replace(" since", " not committed since")
            what = size or "all committed"
            found[disk.image_id] = plain(f"on {facts.where}, disk {disk.id} of VM {facts.vm.id}: {what}")
    return found


def kept_states(vm: int, where: str, kept: Iterable[KeptDisk]) -> Dict[int, str]:
    """Return the lines of images that a VM that is gone has left uncommitted content of, by image."""
    found = {}
    for item in kept:
        image = item.image.get("id") if isinstance(item.image, dict) else None
        if type(image) is int:
            found[image] = plain(
                f"on {where}, kept of disk {item.disk} of VM {vm}: {human(item.bytes)} not committed"
            )
    return found


def plain(text: str) -> str:
    """Return a text as one value: ASCII on one line, as long as Sunstone shows it.

    Nothing in it ends the value or is an escape: names of hosts and errors are others' words.
    """
    line = " ".join("".join(c if " " <= c <= "~" else " " if c.isspace() else "?" for c in text).split())
    line = line.replace('"', "'").replace("\\", "/")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def vm_template(fields: Mapping[str, str]) -> str:
    """Return what sets the vector by one.vm.update with append; without fields it removes the vector."""
    inside = ", ".join(f'{name} = "{text}"' for name, text in fields.items())
    return f"{ATTRIBUTE} = [ {inside} ]\n"


def with_now(vm: Vm, text: str) -> Dict[str, str]:
    """Return the fields that a VM's vector has, with NOW = `text`, without that for ''.

    What a user has put there is no more than the text of fields.
    """
    there = vm.all(f"USER_TEMPLATE/{ATTRIBUTE}")
    fields = there[0].fields() if there else {}
    found = {name: plain(value) for name, value in fields.items() if re.fullmatch(FIELD, name)}
    found.pop(NOW, None)
    return {**found, NOW: plain(text)} if text else found


def image_template(text: str) -> str:
    """Return what sets the line of an image by one.image.update with append; '' removes it."""
    return STATE.line(text) if text else f"{STATE.name} = [ ]\n"


def is_said(vm: Vm, fields: Mapping[str, str]) -> bool:
    """Tell whether a VM has exactly that vector: then nothing is to be written."""
    there = vm.all(f"USER_TEMPLATE/{ATTRIBUTE}")
    return [one.fields() for one in there] == ([dict(fields)] if fields else [])


def is_state(image: Image, text: str) -> bool:
    """Tell whether an image has exactly that line."""
    there = image.all(f"TEMPLATE/{STATE.name}")
    return [one.text(".") for one in there] == ([text] if text else [])
