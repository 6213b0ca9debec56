# SPDX-License-Identifier: Apache-2.0
"""Attributes in the templates of OpenNebula's objects: ours, others' that matter, what is wrong with them.

Actions refuse a wrong value when they meet it; `setup` and `doctor` say so before, and for a misspelt name
too, which no action would ever notice.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Mapping, Sequence
from xml.etree import ElementTree

from ...errors import BadAttribute, SemisharedError
from ...model.share import share
from ...model.store import access as store_access
from ...opennebula.xml import Datastore, Image
from ..base import staging
from ..base.eviction import limits
from ..device import choose
from . import placement

PREFIX = "SEMISHARED_"
HOLDERS: Mapping[str, tuple[str, ...]] = {
    "SEMISHARED_PLACE": ("image", "image datastore"),
    "SEMISHARED_LOCAL": ("image", "image datastore"),
    "SEMISHARED_ON_HOST_FAILURE": ("image", "image datastore"),
    "SEMISHARED_DETACH": ("image", "image datastore"),
    "SEMISHARED_STAGE": ("image", "image datastore"),
    "SEMISHARED_IO_CLASS": ("image", "image datastore", "system datastore"),
    "SEMISHARED_CLASS": ("image", "image datastore"),
    "SEMISHARED_BASES": ("image", "image datastore"),
    "SEMISHARED_SHARE_ACCESS": ("image", "image datastore"),
    "SEMISHARED_CEPH_READER": ("image datastore",),
    "SEMISHARED_CEPH_BRIDGE_USER": ("image datastore",),
    "SEMISHARED_CEPH_FENCE_USER": ("image datastore",),
    "SEMISHARED_CEPH_REMOTE": ("image datastore",),
    "SEMISHARED_CEPH_REMOTE_SECRET": ("image datastore",),
    "SEMISHARED_FS": ("image datastore",),
    "SEMISHARED_FS_ROOT": ("image datastore",),
    "SEMISHARED_FS_QUOTA": ("image datastore",),
    "SEMISHARED_FS_VOLUME": ("image datastore",),
    "SEMISHARED_FS_POOLS": ("image datastore",),
    "SEMISHARED_STORE": ("image datastore",),
    "SEMISHARED_CLOUD": ("image datastore",),
    "SEMISHARED_BASES_LIMIT": ("host",),
    "SEMISHARED_BASES_FLOOR": ("host",),
    "SEMISHARED_POOL": ("host",),
    "SEMISHARED_FENCED": ("host",),
}
"""Name -> in whose template it means something."""
NAME = re.compile(r"[A-Z][A-Z0-9_]*\Z")
DISK_TYPES = ("FILE", "RBD", "FILESYSTEM")


def problems(holder: str, attributes: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the attributes of an 'image', 'image datastore', 'system datastore' or
    'host'.
    """
    found = [text for name in attributes for text in _name_problems(holder, name)]
    checks = {
        "image": _image,
        "image datastore": _image_datastore,
        "system datastore": _system_datastore,
        "host": _host,
    }
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
    if not name.startswith(PREFIX) or holder in HOLDERS.get(name, ()):
        return []
    if name in HOLDERS:
        return [
            f"{name} means nothing in {holder}s, only in {' and '.join(f'{item}s' for item in HOLDERS[name])}"
        ]
    near = nearest(name, [known for known, holders in HOLDERS.items() if holder in holders] or list(HOLDERS))
    return [f"there is no attribute {name}" + (f": is {near} meant?" if near else "")]


def nearest(word: str, known: Sequence[str]) -> str:
    """Return the known word that `word` was probably meant to be, '' if none is near."""
    found = get_close_matches(word.upper(), known, 1, 0.5)
    return found[0] if found else ""


def datastore(attributes: Mapping[str, str]) -> Datastore:
    """Return a datastore with these attributes that no OpenNebula has yet."""
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
    placement.place(image, datastore({}))
    placement.may_recreate(image, datastore({}))
    placement.detach_when(image, datastore({}))
    placement.io_class(image, datastore({}))
    placement.device_classes(image, datastore({}))
    placement.is_hot(image, datastore({}))
    placement.is_client(image, datastore({}))
    staging.when(image, datastore({}))


def _image_datastore(attributes: Mapping[str, str]) -> None:
    kind = attributes.get("DISK_TYPE", "FILE")
    if kind not in DISK_TYPES:
        raise BadAttribute(f"DISK_TYPE is {kind!r}, not one of {', '.join(DISK_TYPES)} in capitals")
    view, empty = datastore(attributes), Image(ElementTree.Element("IMAGE"))
    placement.is_client(empty, view)
    if store_access.is_shares(view):
        share.tree(view)
        return
    access = store_access.access(view)
    if not access.can.has_bridge and attributes.get("BRIDGE_LIST"):
        raise BadAttribute("BRIDGE_LIST means nothing for a mounted store: the front-end mounts it too")
    if access.can.has_bridge:
        store_access.pool(view)
        store_access.bridges(view)
        store_access.fence_user(view)
        if not access.secret:
            raise BadAttribute(
                "there is no CEPH_SECRET: the UUID of the libvirt secret with the key of CEPH_USER"
            )
    driver = attributes.get("DRIVER", "").lower()
    if driver and driver not in access.can.formats:
        raise BadAttribute(f"DRIVER is {driver!r}, not one of {', '.join(access.can.formats)}")
    placement.place(empty, view)
    placement.may_recreate(empty, view)
    placement.detach_when(empty, view)
    placement.io_class(empty, view)
    placement.device_classes(empty, view)
    placement.is_hot(empty, view)


def _system_datastore(attributes: Mapping[str, str]) -> None:
    if attributes.get("SHARED", "NO").upper() != "NO":
        raise BadAttribute(
            "SHARED is YES: a system datastore of semishared lies on the hosts' own disks, SHARED = NO"
        )
    placement.io_class(None, datastore(attributes))


def _host(attributes: Mapping[str, str]) -> None:
    limits(
        attributes.get("SEMISHARED_BASES_LIMIT", "") or "none",
        attributes.get("SEMISHARED_BASES_FLOOR", "") or "none",
        1 << 40,
    )
    if attributes.get("SEMISHARED_POOL"):
        choose.declared(attributes["SEMISHARED_POOL"])
