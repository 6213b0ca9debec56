# SPDX-License-Identifier: Apache-2.0
"""What existed before a recording began, put into the simulated oned."""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, Iterator
from xml.etree import ElementTree

from lab.oned import Img, Oned
from lab.oned.objects import DISK_TYPES, Datastore, Image
from lab.oned.template import from_xml
from traces import Recording, body


def text(element: ElementTree.Element, name: str) -> str:
    """Return the text of a child; empty without one."""
    return element.findtext(name) or ""


def need(element: ElementTree.Element, name: str) -> ElementTree.Element:
    """Return a child that must be there."""
    found = element.find(name)
    assert found is not None, f"{element.tag} has no {name}"
    return found


class Seed:
    """Put into the simulated oned what existed before the recording began."""

    def __init__(self, recording: Recording, oned: Oned) -> None:
        self.recording = recording
        self.oned = oned

    def plant(self) -> None:
        """Set up datastores, images and the next ids."""
        creates = [step["cmd"] for step in self.recording["steps"]]
        fresh = {
            int(step["output"].split()[-1]) for step in self.recording["steps"] if self._makes(step, "image")
        }
        for element in self._elements("DATASTORE"):
            if element.find("ID") is None:
                continue  # the name of a datastore inside an image or disk
            number = int(text(element, "ID"))
            if number not in self.oned.datastores and not (
                number == 104 and creates[0].startswith("onedatastore")
            ):
                self.oned.datastores[number] = self._datastore(element, fresh)
        for element in self._elements("IMAGE"):
            if element.find("ID") is not None and int(text(element, "ID")) not in fresh:
                self._image(element)
        for disk in self._elements("DISK"):
            if disk.find("IMAGE_ID") is not None and int(text(disk, "IMAGE_ID")) not in fresh:
                self._image_of_disk(disk)
        self.oned.next_datastore = 104
        stats = [
            call for step in self.recording["steps"] for call in step["calls"] if call["action"] == "stat"
        ]
        if stats:
            self.oned.next_request = int(stats[0]["argv"][0])  # counts requests since oned started
        self.oned.next_image = min(fresh, default=0)
        for step in self.recording["steps"]:
            if self._makes(step, "vm"):
                self.oned.next_vm = int(step["output"].split()[-1])
                break

    @staticmethod
    def _makes(step: Dict[str, Any], kind: str) -> bool:
        if step["rc"] != 0:
            return False
        verbs = {
            "vm": ("onevm create",),
            "image": ("oneimage create", "oneimage clone", "onevm disk-saveas"),
        }[kind]
        return str(step["cmd"]).startswith(verbs)

    def _elements(self, tag: str) -> Iterator[ElementTree.Element]:
        """Yield elements of the recording, those served first coming first."""
        for step in self.recording["steps"]:
            keys = [call.get(name) for call in step["calls"] for name in ("stdin", "vm_info")]
            for key in [*keys, *step["info_after"].values()]:
                served = body(self.recording, key).strip()
                if served.startswith("<") and not served.startswith("<domain"):
                    yield from ElementTree.fromstring(served).iter(tag)

    def _datastore(self, element: ElementTree.Element, fresh: set[int]) -> Datastore:
        get = partial(text, element)
        images = [int(item.text or "0") for item in element.findall("IMAGES/ID")]
        template = from_xml(need(element, "TEMPLATE"))
        return Datastore(
            int(get("ID")),
            get("NAME"),
            int(get("TYPE")),
            get("DS_MAD"),
            get("TM_MAD"),
            get("BASE_PATH"),
            template,
            [number for number in images if number not in fresh],
            int(get("TOTAL_MB")),
            int(get("FREE_MB")),
            int(get("USED_MB")),
        )

    def _image(self, element: ElementTree.Element) -> None:
        get = partial(text, element)
        number = int(get("ID"))
        if number in self.oned.images:
            return
        self.oned.images[number] = Image(
            number,
            get("NAME"),
            int(get("TYPE")),
            get("PERSISTENT") == "1",
            int(get("DATASTORE_ID")),
            get("DATASTORE"),
            from_xml(need(element, "TEMPLATE")),
            get("PATH"),
            get("SOURCE"),
            get("FORMAT"),
            get("FS"),
            int(get("DISK_TYPE")),
            int(get("SIZE")),
            Img.READY,
            Img.READY,
            snapshots=from_xml(need(element, "SNAPSHOTS")),
        )

    def _image_of_disk(self, element: ElementTree.Element) -> None:
        """Reconstruct an image nobody asked the API for from a disk made of it."""
        get = partial(text, element)
        number = int(get("IMAGE_ID"))
        if number in self.oned.images:
            return
        self.oned.images[number] = Image(
            number,
            get("IMAGE"),
            2,
            get("PERSISTENT") == "YES",
            int(get("DATASTORE_ID")),
            get("DATASTORE"),
            {"DEV_PREFIX": get("DEV_PREFIX")},
            "",
            get("SOURCE"),
            get("FORMAT"),
            "",
            DISK_TYPES.index(get("TYPE")),
            int(get("ORIGINAL_SIZE")),
            Img.READY,
            Img.READY,
        )
