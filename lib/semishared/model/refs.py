# SPDX-License-Identifier: Apache-2.0
"""Steps, and references in them: images, disks, and the disk that an image waits for.

model/steps.py passes all of it on.
"""

from __future__ import annotations

from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, Optional, TypeVar

from ..errors import BadArguments
from ..named import Named, NamedTuple
from .disk import names as disk_names
from .store.access import MOUNTED, Access, check_source

if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault

    A = WithDefault("A", covariant=True, default=Any)

    class Step(Named, Generic[A]):
        """A step whose answer is an A; its class name is its name on the wire. `Step` alone: any step."""

else:

    class Step(Named):
        __class_getitem__ = classmethod(GenericAlias)


C = TypeVar("C")


def looks(cls: C) -> C:
    """Mark a step as a look: it changes nothing wherever it is carried out, and a dry run may send it."""
    cls.looks = True  # type: ignore[attr-defined]
    return cls


def answer_of(step: type[Step]) -> Any:
    """Return the type of a step's answer: a class, None, or the text of an annotation."""
    return step.__orig_bases__[0].__args__[0]  # type: ignore[attr-defined]


def is_look(step: Step) -> bool:
    """Tell whether a step changes nothing."""
    return getattr(type(step), "looks", False) is True


class Refusal(Named):
    """An error of one thing among many that are asked about: the others are answered all the same.

    `errors.from_id(*refusal)` is the error.
    """

    id: str
    detail: str


class ImageRef(NamedTuple):
    """An image in a store: a path in a mounted one, else POOL/IMAGE and how that is reached."""

    store: int
    id: int
    format: str
    source: str
    generation: str = ""
    """The generation that must be used; '' means the image's current one."""
    access: Access = MOUNTED

    @property
    def root(self) -> str:
        """Return the directory or pool that the image is in."""
        return self.source.rpartition("/")[0]

    @property
    def epochs(self) -> str:
        """Return the store or image that has the epochs of its VMs."""
        found: str = getattr(self, self.access.can.epochs)
        return found

    @property
    def base_prefix(self) -> str:
        """Return the prefix of the names of its bases."""
        from .base import names as base_names  # most actions name none

        return base_names.prefix(self.store, self.id)

    @property
    def base_name(self) -> str:
        """Return the name of the base of its generation, '' if it names none."""
        from .base import names as base_names

        return base_names.name(self.store, self.id, self.generation) if self.generation else ""

    def to_data(self) -> dict[str, object]:
        """Return the image as JSON data; a mounted store's access may be left out."""
        data: dict[str, object] = {**self._asdict(), "access": self.access.to_data()}
        if self.access == MOUNTED:
            del data["access"]
        return data

    @classmethod
    def from_data(cls, data: object) -> ImageRef:
        """Return the image in JSON data; raise BadArguments."""
        if not isinstance(data, dict) or set(data) | {"access"} != set(cls._fields):
            raise BadArguments(f"not an image: {str(data)[:200]}")
        found = cls(**{**data, "access": Access.from_data(data["access"]) if "access" in data else MOUNTED})
        numbers, words = (found.store, found.id), (found.format, found.generation)
        if (
            not all(type(number) is int for number in numbers)
            or not all(_is_word(word) for word in words)
            or not _is_plain(found.source)
        ):
            raise BadArguments(f"not an image: {str(data)[:200]}")
        check_source(found.access, found.source)
        return found


def _is_word(text: object) -> bool:
    """Tell whether a format or generation cannot be taken for a path or an option."""
    return isinstance(text, str) and text.isascii() and (text.isalnum() or not text)


def _is_plain(path: object) -> bool:
    return isinstance(path, str) and "\0" not in path and ".." not in path.split("/")


class DiskRef(NamedTuple):
    """A disk of a VM on the machine that executes the plan."""

    vm: int
    disk: int
    vm_dir: str

    @property
    def path(self) -> str:
        return disk_names.disk(self.vm_dir, self.disk)

    def to_data(self) -> dict[str, object]:
        """Return the disk as JSON data."""
        return self._asdict()

    @classmethod
    def from_data(cls, data: object) -> DiskRef:
        """Return the disk in JSON data; raise BadArguments."""
        if not isinstance(data, dict) or set(data) != set(cls._fields):
            raise BadArguments(f"not a disk: {str(data)[:200]}")
        return cls(**data)


class Owner(NamedTuple):
    """The disk whose guest writes what the image shall hold.

    A store keeps one for each image that waits for a diff (store.Store.claim):

        mounted store    <datastore>/.semishared/NAME/owner.json
        pool             a key of the image's metadata

    `ln` of a persistent image whose place is `diff` claims the image; the last claim counts. A commit is
    refused unless the record still names its disk and cloud, no later epoch, and the base that the diff lies
    over, and the image is what it was at the claim or what the last commit of this disk has made of it
    (store/commit/claims.py).
    """

    vm: int
    disk: int
    epoch: int
    """SEQ of the VM's history at which its host last claimed or committed; the higher one counts."""
    generation: str
    """The generation below the diff: the image's at the claim, and the base's on the host as long as the diff
    exists.
    """
    host: str = ""
    """For people: the host of the diff when this was written."""
    cloud: str = ""
    """'' of a cloud without an id."""

    def is_same(self, other: Owner) -> bool:
        """Tell whether both are the same disk, in any state."""
        return (self.vm, self.disk, self.cloud) == (other.vm, other.disk, other.cloud)

    def to_data(self) -> dict[str, object]:
        """Return the owner as JSON data."""
        return self._asdict()

    @classmethod
    def from_data(cls, data: object) -> Optional[Owner]:
        """Return the owner in JSON data, None without a valid one."""
        if not isinstance(data, dict) or not set(cls._fields[:4]) <= set(data) <= set(cls._fields):
            return None
        found = cls(**data)
        numbers, texts = found[:3], found[3:]
        good = all(type(number) is int for number in numbers) and all(isinstance(text, str) for text in texts)
        return found if good else None
