# SPDX-License-Identifier: Apache-2.0
"""Images with snapshots in the layout of OpenNebula's own file drivers (`qcow2`, `shared`).

    SOURCE                    their oldest layer; in our layout the present content
    SOURCE.snap/NAME.snap  -> .          for relative backing names; our layout has no link there
               /0          -> SOURCE
               /1          qcow2 over 0: the writes after snapshot 0; the highest number is the present
               /3.current  names the layer that snapshot 3 has become part of

Raw images with snapshots, and images without any, are the same in both layouts: SOURCE is the content.
"""

from __future__ import annotations

import os
import stat

from ...errors import StockImage
from ...model.disk import names as disk_names
from ...tools import beneath, files, layers


def is_layered(source: str, format: str) -> bool:
    """Return True if the image's content is in layers of a stock driver, and not in `source` itself.

    A directory with both their links and numbered files counts as such layers.
    """
    try:
        with beneath.directory(
            os.path.dirname(source), disk_names.layers(os.path.basename(source))
        ) as folder:
            return _is_layered(folder, format)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_layered(folder: str, format: str) -> bool:
    numbered, signs = [], False
    for name in os.listdir(folder):
        try:
            mode = os.lstat(f"{folder}/{name}").st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(mode) or name.endswith(".current"):
            signs = True
        elif disk_names.is_number(name) and stat.S_ISREG(mode):
            numbered.append(name)
    if not numbered:
        return False
    # The first bytes of a raw copy belong to a guest, and prove nothing.
    return signs or (format == "qcow2" and any(_has_backing(f"{folder}/{name}") for name in numbered))


def _has_backing(path: str) -> bool:
    try:
        return layers.backing_of(path)[0] != ""
    except OSError:
        return False


def refuse(source: str, format: str) -> None:
    """Raise StockImage if the image's content is in layers of a stock driver."""
    if is_layered(source, format):
        raise StockImage(
            f"image {source} has snapshots of OpenNebula's own drivers: what it holds is in "
            f"{disk_names.layers(source)}"
        )


def forget_links(folder: str) -> None:
    """Remove a stock driver's links beside an image without layers; with a snapshot they mean layers."""
    for name in os.listdir(folder):
        if os.path.islink(f"{folder}/{name}"):
            files.unlink(f"{folder}/{name}")
