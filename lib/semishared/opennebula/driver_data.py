# SPDX-License-Identifier: Apache-2.0
"""Standard input of a datastore action: DS_DRIVER_ACTION_DATA."""

from __future__ import annotations

from xml.etree import ElementTree

from .encoded import decode
from .xml import Datastore, Element, Image, View, parse


class DriverData:
    """Image and datastore that an action is asked for; raise BadArguments if that cannot be read."""

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
