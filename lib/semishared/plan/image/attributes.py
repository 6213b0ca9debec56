# SPDX-License-Identifier: Apache-2.0
"""Attributes in the templates of OpenNebula's objects: ours, others' that matter, what is wrong with them.

Actions refuse a wrong value when they meet it; `setup` and `doctor` say so before, and for a misspelt name
too, which no action would ever notice.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Mapping
from xml.etree import ElementTree

from ...errors import BadAttribute, SemisharedError
from ...model import attributes as rows
from ...model import stock
from ...model.attributes import (
    BASES_FLOOR,
    BASES_LIMIT,
    HOST,
    HOST_POOL,
    IMAGE,
    IMAGE_DS,
    PREFIX,
    SYSTEM_DS,
)
from ...model.share import share
from ...model.store import template
from ...opennebula.xml import Datastore, Image
from ..base.eviction import limits
from ..device import choose
from . import placement

NAME = re.compile(r"[A-Z][A-Z0-9_]*\Z")


def problems(holder: str, attributes: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the attributes of an image, a host, or a datastore of either kind."""
    found = [text for name in attributes for text in _name_problems(holder, name)]
    found += _in_vain(holder, attributes)
    checks = {IMAGE: _image, IMAGE_DS: _image_datastore, SYSTEM_DS: _system_datastore, HOST: _host}
    try:
        checks[holder](attributes)
    except SemisharedError as e:
        found.append(
            e.detail.replace(" of datastore -1", "")
            .replace(" of image -1", "")
            .replace("datastore -1", "the datastore")
        )
    return found


def _name_problems(holder: str, name: str) -> list[str]:
    known = rows.known()
    row = known.get(name)
    if not name.startswith(PREFIX) or row and holder in row.of:
        return []
    if row:
        return [f"{name} means nothing in {holder}s, only in {' and '.join(f'{item}s' for item in row.of)}"]
    near = get_close_matches(name.upper(), [word for word in known if holder in known[word].of], 1, 0.5)
    return [f"there is no attribute {name}" + "".join(f": is {word} meant?" for word in near)]


OF_STOCK = {IMAGE: stock.IMAGE, IMAGE_DS: stock.DATASTORE, SYSTEM_DS: stock.DATASTORE, HOST: stock.HOST}


def _in_vain(holder: str, attributes: Mapping[str, str]) -> list[str]:
    """Return what to say of attributes of stock's that are refused, or have no effect.

    What is refused below, where the datastore is parsed, is said there.
    """
    rows = stock.said(OF_STOCK[holder], attributes)
    return [
        row.words(
            f"the {stock.DATASTORE}" if holder.endswith(stock.DATASTORE) else f"the {holder}",
            attributes[row.name],
        )
        for row in rows
        if row.name != "DISK_TYPE" and (row.name != "CEPH_KEY" or attributes.get("DISK_TYPE") != "RBD")
    ]


def datastore(attributes: Mapping[str, str]) -> Datastore:
    """Return a datastore with these attributes, of no OpenNebula."""
    root = ElementTree.Element("DATASTORE")
    ElementTree.SubElement(root, "ID").text = attributes.get("NAME", "-1")
    return Datastore(_with_template(root, attributes))


def _with_template(root: ElementTree.Element, attributes: Mapping[str, str]) -> ElementTree.Element:
    template = ElementTree.SubElement(root, "TEMPLATE")
    for name, value in attributes.items():
        ElementTree.SubElement(template, name).text = value
    return root


def _image(attributes: Mapping[str, str]) -> None:
    image = Image(_with_template(ElementTree.Element("IMAGE"), attributes))
    _disks(image, datastore({}))


def _disks(image: Image, view: Datastore) -> None:
    placement.place(image, view)
    placement.is_client(image, view)
    for row in rows.of_images():
        row.value(image, view)


def _image_datastore(attributes: Mapping[str, str]) -> None:
    kind = attributes.get("DISK_TYPE", "FILE")
    if kind not in rows.DISK_TYPES:
        raise BadAttribute(f"DISK_TYPE is {kind!r}, not one of {', '.join(rows.DISK_TYPES[1:])} in capitals")
    view, empty = datastore(attributes), Image(ElementTree.Element("IMAGE"))
    placement.is_client(empty, view)
    if template.is_shares(view):
        share.tree(view)
        return
    access = template.access(view)
    template.changers(view, 0)
    machine = template.machine(view, 0)
    if machine:
        template.pool(view)
        template.fence_user(view)
        if not access.secret:
            raise BadAttribute(
                "there is no CEPH_SECRET: the UUID of the libvirt secret with the key of CEPH_USER"
            )
    driver = attributes.get("DRIVER", "").lower()
    if driver and driver not in access.can.formats:
        raise BadAttribute(f"DRIVER is {driver!r}, not one of {', '.join(access.can.formats)}")
    _disks(empty, view)


def _system_datastore(attributes: Mapping[str, str]) -> None:
    if attributes.get("SHARED", "NO").upper() != "NO":
        raise BadAttribute(
            "SHARED is YES: a system datastore of semishared lies on the hosts' own disks, SHARED = NO"
        )
    rows.IO_CLASS.of_store(datastore(attributes))


def _host(attributes: Mapping[str, str]) -> None:
    limits(attributes.get(BASES_LIMIT.name) or "none", attributes.get(BASES_FLOOR.name) or "none", 1 << 40)
    if attributes.get(HOST_POOL.name):
        choose.declared(attributes[HOST_POOL.name])
