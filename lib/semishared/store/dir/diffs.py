# SPDX-License-Identifier: Apache-2.0
"""Claims, commits and epochs in a mounted store (store.Store), imported only when there is work.

The work is in store/dir/commit.py, store/dir/journal.py and store/dir/epochs.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...model.refs import ImageRef
from ...model.store import dir_names
from ...tools import beneath, files
from . import image as dir_image
from . import marker
from .image import Stored

if TYPE_CHECKING:
    from ...model.refs import Owner
    from ..commit.claims import Committed, Diff


def settle(stored: Stored) -> None:
    """Complete a decided commit: every machine does so before it reads or changes the image."""
    try:
        with dir_image.side(stored) as side:
            if files.is_absent(dir_names.commit(side)):
                return
    except (FileNotFoundError, NotADirectoryError):
        return
    from . import journal

    journal.settle(stored)


class DirDiffs:
    """The methods of store.Store for diffs and epochs."""

    def settle(self, image: ImageRef) -> None:
        """Complete a decided journal."""
        settle(Stored(image.source))

    def claim(self, image: ImageRef, owner: Owner) -> Owner | None:
        """Write a record beside the image."""
        from . import commit as dir_commit

        return dir_commit.claim(image, owner)

    def owner(self, image: ImageRef) -> Owner | None:
        """Read the record beside the image."""
        stored = Stored(image.source)
        try:
            beneath.status(stored.datastore, dir_names.owner(stored.below))
        except FileNotFoundError:
            return None  # most images: import nothing more
        except OSError:
            pass
        from . import commit as dir_commit

        return dir_commit.owner(image)

    def disown(self, image: ImageRef, owner: Owner) -> None:
        """Remove the record beside the image."""
        from . import commit as dir_commit

        dir_commit.disown(image, owner)

    def may_commit(self, image: ImageRef, owner: Owner) -> None:
        """Compare the record and the image with `owner`."""
        from . import commit as dir_commit

        dir_commit.may_commit(image, owner)

    def commit(self, image: ImageRef, owner: Owner, diff: Diff) -> Committed:
        """Write the new content or a journal beside the image, then complete the commit."""
        from . import commit as dir_commit

        return dir_commit.commit(image, owner, diff)

    def note_epoch(self, image: ImageRef, vm: int, epoch: int) -> None:
        """Record the epoch in a file name, for the whole store."""
        from . import epochs

        marker.check(image.root, image.access.marker)
        epochs.note(image, vm, epoch)

    def epoch(self, image: ImageRef, vm: int) -> int:
        """Read the epoch from that file name."""
        from . import epochs

        return epochs.read(image, vm)
