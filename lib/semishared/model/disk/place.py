# SPDX-License-Identifier: Apache-2.0
"""The places that a disk can have, and what each means: one table. A new place is a row. And its I/O classes.

overlay       on the host, over a leased base
diff          on the host, over a leased base; committed to the image, whose new content it is
copy          on the host, whole
remote-first  on the host, over the image on the store
volatile      on the host, made empty
in-place      on the store: the image itself
store-clone   on the store, over the image
"""

from __future__ import annotations

from ...named import NamedTuple

IO_CLASSES = ("production", "normal", "scratch")
"""What a disk's I/O is to that of others on the same host; NORMAL where no attribute says it."""
NORMAL = "normal"


class Place(NamedTuple):
    """Where a disk lies, what it lies over, and what follows from that."""

    name: str
    """Its "how" in records and in answers of hosts."""
    is_local: bool
    """The disk lies in its VM's directory, on the host; else on the store of its image."""
    snapshots: str
    """What its snapshots are: 'layers' below the active one, 'copies' beside the image, or 'none'."""
    backing: str
    """What it lies over: 'base' (of the host), 'store' (the image), or 'none'."""
    leases: bool
    """It needs a base, and so holds a lease on it."""
    commits: bool = False
    """It is what its guest has written of a persistent image: it goes there, and until then it is the only
    copy of that.
    """

    @property
    def where(self) -> str:
        """Return its "place" in records."""
        return "local" if self.is_local else "shared"

    @property
    def is_layered(self) -> bool:
        return self.snapshots == "layers"

    @property
    def is_clone(self) -> bool:
        """Tell whether the disk is a clone beside its image, on the store."""
        return not self.is_local and self.backing == "store"

    @property
    def is_remote(self) -> bool:
        """Tell whether the disk lies on the host and reads from the store what its guest has not written."""
        return self.is_local and self.backing == "store"

    @property
    def is_image(self) -> bool:
        """Tell whether the disk is the image itself: what its guest writes is the image's content."""
        return not self.is_local and self.backing == "none"


OVERLAY = Place("overlay", True, "layers", backing="base", leases=True)
DIFF = Place("diff", True, "layers", backing="base", leases=True, commits=True)
COPY = Place("copy", True, "layers", backing="none", leases=False)
REMOTE_FIRST = Place("remote-first", True, "layers", backing="store", leases=False)
VOLATILE = Place("volatile", True, "none", backing="none", leases=False)
IN_PLACE = Place("in-place", False, "copies", backing="none", leases=False)
STORE_CLONE = Place("store-clone", False, "layers", backing="store", leases=False)
PLACES = {place.name: place for place in (OVERLAY, DIFF, COPY, REMOTE_FIRST, VOLATILE, IN_PLACE, STORE_CLONE)}
