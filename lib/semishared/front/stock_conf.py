# SPDX-License-Identifier: Apache-2.0
"""Configuration of OpenNebula's own storage drivers, of which some is ours to follow (model/stock.py).

The files are in shell syntax, and those scripts have bash read them. Here only plain assignments are read: a
value that bash would compute is refused by name, if it is one of those that matter.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Mapping, Sequence, Tuple

from ..errors import BadAttribute
from ..model.attributes import POOL_NAME
from ..named import NamedTuple

if TYPE_CHECKING:
    from ..opennebula.xml import Datastore

REMOTES = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", ".."))
ETC = f"{REMOTES}/etc/datastore"
KNOWN = ("btrfs", "ext2", "ext3", "ext4", "xfs")
"""Those that mkfs can be asked for (tools/qemu_img.py)."""
TRASH, OPTIONS = "CEPH_TRASH", "QCOW2_OPTIONS"
SWAP, SUPPORTED = "swap", "ext2,ext3,ext4,xfs"
"""What stock supports where no file says otherwise."""


def values(path: str, *prefixes: str) -> dict[str, str]:
    """Return the values of the file `path` whose names begin with a prefix, the last one of each name.

    None if there is no such file. Raise BadAttribute for one that is no plain value, or cannot be read.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().split("\n")
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise BadAttribute(f"{os.path.basename(path)} cannot be read: {e.strerror}: {path}") from None
    found = {}
    for line in lines:
        name, is_one, text = line.strip().removeprefix("export ").lstrip().partition("=")
        if is_one and name.startswith(prefixes) and name.replace("_", "a").isalnum():
            found[name] = _value(f"{name} of {os.path.basename(path)}", text)
    return found


def _value(what: str, text: str) -> str:
    quote = text[:1] if text[:1] in ("'", '"') else ""
    found, is_whole, rest = text[len(quote) :].partition(quote or " ")
    is_plain = not any(sign in found for sign in "$`\\\0" + "'\"" * (not quote))
    if not is_plain or (quote and not is_whole) or not (rest.strip() or "#").startswith("#"):
        raise BadAttribute(f"{what} is {text[:100]!r}: nothing but a plain value is read")
    return found


def filled(datastore: Datastore) -> Datastore:
    """Return a datastore on Ceph with what the site's ceph.conf says where its own template does not."""
    template = datastore.element.find("TEMPLATE")
    if datastore.attribute("DISK_TYPE") == "RBD" and template is not None:
        said = values(f"{ETC}/ceph/ceph.conf", TRASH).get(TRASH, "")
        if said and not datastore.attribute(TRASH):
            from xml.etree import ElementTree

            ElementTree.SubElement(template, TRASH).text = said
    return datastore


def other_pool(datastore: Datastore, etc: str = "") -> str:
    """Return why no image is made on a datastore whose pool ceph.conf names otherwise, '' if there is none.

    Ours is `one` where a datastore names none, and its images are there.
    """
    name, usual = POOL_NAME.name, POOL_NAME.default
    said = values(f"{etc or ETC}/ceph/ceph.conf", name).get(name, usual)
    if POOL_NAME.text(datastore) or said == usual:
        return ""
    return (
        f"{name} of ceph.conf is {said!r}, and datastore {datastore.id} has none, so its images are in "
        f"{usual!r}: say in its template which it is"
    )


READ = (("ceph", "ceph/ceph.conf", "RBD"), ("fs", "fs/fs.conf", ""))
"""The driver whose scripts read a file, the file, and DISK_TYPE of our datastores which it would be for."""


class Doubts(NamedTuple):
    """What doctor says of the site's files."""

    refused: Tuple[str, ...]
    """What an action would refuse."""
    in_vain: Tuple[str, ...]
    """What has no effect here."""


def doubts(etc: str, tmrc: str, ours: Sequence[Datastore], others: Sequence[Datastore]) -> Doubts:
    """Return what to say of the files below `etc` and of tmrc, for datastores of ours beside `others`.

    What a file says in vain counts only where no driver of OpenNebula's own has a datastore that reads it.
    """
    from ..model import stock

    stores = [store for store in ours if not store.is_system]
    on_ceph = [store for store in stores if store.attribute("DISK_TYPE") == "RBD"]
    drivers = {store.store_driver for store in others if not store.is_system}
    names = [row.name for row in stock.ROWS if row.of == stock.CONFIGURATION and row.verdict == stock.NOTHING]
    refused: list[str] = []
    in_vain: list[str] = []
    for look in (
        lambda: file_systems(etc),
        lambda: overlay_options(values(tmrc, OPTIONS).get(OPTIONS, "")),
        lambda: refused.extend(filter(None, (other_pool(store, etc) for store in on_ceph))),
    ):
        try:
            look()
        except BadAttribute as e:
            refused.append(e.detail)
    for driver, file, kind in READ:
        if driver in drivers or not (on_ceph if kind else len(stores) > len(on_ceph)):
            continue
        try:
            said = values(f"{etc}/{file}", *names)
        except BadAttribute as e:
            refused.append(e.detail)
            continue
        rows = stock.said(stock.CONFIGURATION, said)
        in_vain += [row.words(os.path.basename(file), said[row.name]) for row in rows if row.name in names]
    return Doubts(tuple(refused), tuple(in_vain))


OVERLAY = {
    *("cluster_size", "compat", "compression_type", "extended_l2", "lazy_refcounts", "nocow"),
    *("preallocation", "refcount_bits"),
}
"""Options of qcow2 that a site may choose for overlays; others would make another file of it."""


def overlay_options(text: str) -> str:
    """Return the options of overlays (`qemu-img create -o`) in QCOW2_OPTIONS, which has words for qemu-img.

    '' for none, which is QEMU's own choice. Raise BadAttribute.
    """
    words = text.split()
    flags, options = words[::2], [one for word in words[1::2] for one in word.split(",")]
    is_plain = all(re.match(r"[a-z0-9_]+=[A-Za-z0-9.]+\Z", option) for option in options)
    if len(words) % 2 or {*flags} - {"-o"} or not is_plain:
        raise BadAttribute(f"QCOW2_OPTIONS of tmrc is {text[:100]!r}, not `-o key=value,key=value`")
    unknown = {option.partition("=")[0] for option in options} - OVERLAY
    if unknown:
        raise BadAttribute(
            f"QCOW2_OPTIONS of tmrc has {', '.join(sorted(unknown))}, none of {', '.join(sorted(OVERLAY))}"
        )
    return ",".join(options)


def file_systems(etc: str = "") -> Mapping[str, tuple[str, ...]]:
    """Return the options of mkfs for each file system that the site supports; raise BadAttribute.

    They are those of datastore.conf: SUPPORTED_FS, and FS_OPTS_<FS>.
    """
    told = values(f"{etc or ETC}/datastore.conf", "SUPPORTED_FS", "FS_OPTS_")
    names = told.get("SUPPORTED_FS", SUPPORTED).replace(",", " ").split()
    unknown = sorted({*names} - {*KNOWN})
    if unknown:
        raise BadAttribute(
            f"SUPPORTED_FS of datastore.conf has {', '.join(unknown)}, none of {', '.join(KNOWN)}"
        )
    options = {name: tuple(told.get(f"FS_OPTS_{name}", "").split()) for name in names}
    return {SWAP: (), **options}
