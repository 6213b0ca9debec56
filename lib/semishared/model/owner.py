# SPDX-License-Identifier: Apache-2.0
"""Whose diff an image is waiting for: the one disk that may commit to it (store.Store.claim).

    mounted store    <datastore>/.semishared/NAME/owner.json
    pool             a key of the image's metadata

`ln` of a persistent image whose place is `diff` claims it; the last claim counts. A commit is refused unless
the record still names its disk and cloud, no later epoch, and the base that the diff lies over, and the image
is what it was at the claim, or what the last commit of this disk has made of it (store/claims.py).
"""

from __future__ import annotations

from typing import Optional

from ..named import NamedTuple


class Owner(NamedTuple):
    """The disk whose guest writes what the image shall hold."""

    vm: int
    disk: int
    epoch: int
    """SEQ of the VM's history at which its host last claimed or committed: of two the higher counts."""
    generation: str
    """What the diff lies over: the image's own when it was claimed, and the base's on the host for as long as
    the diff is there.
    """
    host: str = ""
    """For people: where the diff was when this was written."""
    cloud: str = ""
    """'' of a cloud without an id."""

    def is_same(self, other: Owner) -> bool:
        """Tell whether both are the same disk, whatever has become of it."""
        return (self.vm, self.disk, self.cloud) == (other.vm, other.disk, other.cloud)

    def to_data(self) -> dict[str, object]:
        """Return the owner as JSON data."""
        return self._asdict()

    @classmethod
    def from_data(cls, data: object) -> Optional[Owner]:
        """Return the owner in JSON data, None if there is none to be believed."""
        if not isinstance(data, dict) or not set(cls._fields[:4]) <= set(data) <= set(cls._fields):
            return None
        found = cls(**data)
        numbers, texts = found[:3], found[3:]
        good = all(type(number) is int for number in numbers) and all(isinstance(text, str) for text in texts)
        return found if good else None
