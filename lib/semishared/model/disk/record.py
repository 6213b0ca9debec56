# SPDX-License-Identifier: Apache-2.0
"""The record of a disk, which the action that makes the disk writes beside it, and oned's word on its image.

    <VMDIR>/.semishared/disk.<N>.json
        {"version": 1, "disk": N, "place": ..., "how": ..., "format": ..., "path": ..., ...}

It is read and written here alone. Every later action, the domain XML, backups and reports go by it.
"""

from __future__ import annotations

import json
import posixpath
from typing import Any, Optional, Tuple

from ...errors import BadArguments, BadRecord
from ...named import NamedTuple
from ..device.classes import are_words
from ..refs import ImageRef
from ..store.access import is_path
from . import names as disk_names
from .network_disk import NetworkDisk
from .place import IO_CLASSES, NORMAL, PLACES, Place

VERSION = 1
FORMATS = ("raw", "qcow2")


class Record(NamedTuple):
    """What was made of one disk, and where."""

    disk: int
    place: Place
    format: str
    path: str = ""
    """The file that the guest writes to, or the link that leads to it; '' on the network."""
    readonly: bool = False
    image: Optional[ImageRef] = None
    """The image that the disk was made from, with its generation if known; None for an empty disk."""
    network: Optional[NetworkDisk] = None
    """Where QEMU opens the disk, if that is no path."""
    raw_layer: Optional[int] = None
    """The number of its raw layer: the guest owns that layer's first bytes, and could write a header there.
    """
    over: Optional[NetworkDisk] = None
    """What its lowest layer lies over, if that is on the network."""
    committed: Optional[int] = None
    """Of a diff, the highest layer that its image has; None if it has none."""
    io_class: str = NORMAL
    """One of IO_CLASSES, as the image or a datastore last said it (plan/image/placement.py)."""
    classes: Tuple[str, ...] = ()
    """Classes of devices that the disk was made for (plan/device/choose.py); none: any."""
    hot: bool = False
    """Whether its guest is to read its base from memory, where there is room (device/hot.py)."""

    @property
    def how(self) -> str:
        return self.place.name

    @property
    def is_local(self) -> bool:
        return self.place.is_local

    @property
    def layer(self) -> str:
        """Return the number of the active layer of a disk on a host, '' if that is a plain file."""
        own = disk_names.disk_file(self.path)
        return own.layer if own and own.disk == self.disk else ""

    def active(self, plain: str) -> str:
        """Return the file that the guest writes to, if the disk's own path is `plain`."""
        return disk_names.layer(plain, self.layer) if self.layer else plain

    def source(self, named: str) -> str:
        """Return what libvirt is to open for the disk that OpenNebula names `named`.

        A local disk stays where this deployment says that the VM directory is; one on the network has no
        path.
        """
        return self.active(named) if self.is_local else self.path or named

    @property
    def reads_hot(self) -> bool:
        """Tell whether its guest may read from a copy of its base in memory: no diff may."""
        return self.hot and self.place.leases and not self.place.commits and self.image is not None

    @property
    def of_image(self) -> ImageRef:
        """Return the image that the disk was made from; raise BadRecord if there is none."""
        if self.image is None:
            raise BadRecord(f"the record of disk {self.disk} ({self.how}) names no image")
        return self.image

    @property
    def stored(self) -> Optional[ImageRef]:
        """Return the image in a store that the disk is: its own, or a clone; None for files of its own."""
        if self.network:
            return self.of_image._replace(source=self.network.name)
        return self.of_image if self.place.is_image else None

    @property
    def bridged(self) -> Optional[ImageRef]:
        """Return the image on the network that the disk is; None for any other disk."""
        return self.stored if self.network else None

    def to_data(self) -> dict[str, object]:
        """Return the record as JSON data."""
        data: dict[str, object] = {
            "version": VERSION,
            "disk": self.disk,
            "place": self.place.where,
            "how": self.how,
            "format": self.format,
            "path": self.path,
            "readonly": self.readonly,
        }
        if self.image is not None:
            data["image"] = self.image.to_data()
        if self.network is not None:
            data["network"] = self.network.to_data()
        if self.raw_layer is not None:
            data["raw_layer"] = self.raw_layer
        if self.over is not None:
            data["over"] = self.over.to_data()
        if self.committed is not None:
            data["committed"] = self.committed
        if self.io_class != NORMAL:
            data["io_class"] = self.io_class
        if self.classes:
            data["classes"] = list(self.classes)
        if self.hot:
            data["hot"] = True
        return data

    @classmethod
    def parse(cls, disk: int, text: bytes) -> Record:
        """Return the record of `disk` in `text`; raise BadRecord."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise BadRecord(f"the record of disk {disk} is not JSON: {e}") from None
        return cls.from_data(data, disk)

    @classmethod
    def from_data(cls, data: object, disk: Optional[int] = None) -> Record:
        """Return the record in JSON data, of `disk` if given; raise BadRecord if it cannot be right."""
        name = disk if disk is not None else data.get("disk") if isinstance(data, dict) else None
        what = f"the record of disk {name}"
        if not isinstance(data, dict) or type(data.get("version")) is not int:
            raise BadRecord(f"{what} has no version")
        if data["version"] != VERSION:
            newer = (
                f"newer than {VERSION} known here" if data["version"] > VERSION else "which was never written"
            )
            raise BadRecord(f"{what} has version {data['version']}, {newer}")
        number, how, path, format = data.get("disk"), data.get("how"), data.get("path"), data.get("format")
        if type(number) is not int or number != name:
            raise BadRecord(f"{what} is that of disk {number!r}")
        place = PLACES.get(how) if isinstance(how, str) else None
        if place is None or place.where != data.get("place"):
            raise BadRecord(f"{what} says how={how!r}, place={data.get('place')!r}")
        if not isinstance(format, str) or format not in FORMATS:
            raise BadRecord(f"{what} says format={format!r}")
        io_class = data.get("io_class", NORMAL)
        if not isinstance(io_class, str) or io_class not in IO_CLASSES:
            raise BadRecord(f"{what} says io_class={io_class!r}")
        classes = data.get("classes")
        if classes is not None and not (isinstance(classes, list) and are_words(classes)):
            raise BadRecord(f"{what} says classes={classes!r}")
        image, network, over = data.get("image"), data.get("network"), data.get("over")
        raw_layer, committed = (_layer_number(what, data, name) for name in ("raw_layer", "committed"))
        found = cls(
            number,
            place,
            format,
            "",
            data.get("readonly") is True,
            raw_layer=raw_layer,
            committed=committed,
            io_class=io_class,
            classes=tuple(classes or ()),
            hot=data.get("hot") is True,
        )
        try:
            if image is not None:
                found = found._replace(image=_image(image))
            if place.is_remote:
                found = found._replace(over=_over(found.of_image, over))
            if network is not None:
                if place.is_local or path or format != "raw":
                    raise BadRecord(f"says how={how!r}, path={path!r} of a disk on the network")
                return found._replace(network=NetworkDisk.parse(network))
        except (BadArguments, BadRecord) as e:
            raise BadRecord(f"{what}: {e.detail}") from None
        if not isinstance(path, str) or not path:
            raise BadRecord(f"{what} names no path")
        if not path.startswith("/") or any(not c.isprintable() for c in path) or ".." in path.split("/"):
            raise BadRecord(f"{what}: path is not a plain absolute path: {path!r}")
        return found._replace(path="/" + posixpath.normpath(path).lstrip("/"))


def described(answer: Any) -> list[Record]:
    """Return the records in an answer to DescribeVm or ReadRecords; raise BadRecord."""
    return list(map(Record.from_data, answer.records))


def _image(data: object) -> ImageRef:
    image = ImageRef.from_data(data)
    texts, numbers = (image.format, image.source, image.generation), (image.store, image.id)
    if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
        raise BadRecord(f"not an image: {str(data)[:200]}")
    return image


def _over(image: ImageRef, data: object) -> Optional[NetworkDisk]:
    over = NetworkDisk.parse(data) if data is not None else None
    if is_path(image.source) != (over is None) or (over and (over.name != image.source or not over.snapshot)):
        raise BadRecord(f"says over={str(data)[:200]} of a disk over {image.source}")
    return over


def _layer_number(what: str, data: dict[str, object], name: str) -> Optional[int]:
    number = data.get(name)
    if number is not None and type(number) is not int:
        raise BadRecord(f"{what} says {name}={number!r}")
    return number
