# SPDX-License-Identifier: Apache-2.0
"""Configuration of OpenNebula's own storage drivers, of which some is ours to follow (model/stock.py).

The files are in shell syntax, and those scripts have bash read them. Here only plain assignments are read: a
value that bash would compute is refused by name, if it is one of those that matter.
"""

from __future__ import annotations

import os
from typing import Mapping

from ..errors import BadAttribute

REMOTES = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", ".."))
ETC = f"{REMOTES}/etc/datastore"
KNOWN = ("btrfs", "ext2", "ext3", "ext4", "xfs")
"""Those that mkfs can be asked for (tools/qemu_img.py)."""
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


def file_systems() -> Mapping[str, tuple[str, ...]]:
    """Return the options of mkfs for each file system that the site supports; raise BadAttribute.

    They are those of datastore.conf: SUPPORTED_FS, and FS_OPTS_<FS>.
    """
    told = values(f"{ETC}/datastore.conf", "SUPPORTED_FS", "FS_OPTS_")
    names = told.get("SUPPORTED_FS", SUPPORTED).replace(",", " ").split()
    unknown = sorted({*names} - {*KNOWN})
    if unknown:
        raise BadAttribute(
            f"SUPPORTED_FS of datastore.conf has {', '.join(unknown)}, none of {', '.join(KNOWN)}"
        )
    options = {name: tuple(told.get(f"FS_OPTS_{name}", "").split()) for name in names}
    return {SWAP: (), **options}
