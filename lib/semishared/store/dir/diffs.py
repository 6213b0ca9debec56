# SPDX-License-Identifier: Apache-2.0
"""What a mounted store does for who may write to an image from elsewhere (store.Store): diffs, and VMs that
were taken over.

Most of it is loaded when there is something to do: store/dir/commit.py, store/dir/journal.py,
store/dir/epochs.py.
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
    """End a commit to the image that is decided: everybody does before they look at it, or change it."""
    try:
        with dir_image.side(stored) as side:
            if files.is_absent(dir_names.commit(side)):
                return
    except (FileNotFoundError, NotADirectoryError):
        return
    from . import journal

    journal.settle(stored)


class DirDiffs:
    """The verbs."""

    def settle(self, image: ImageRef) -> None:
        """Replay a journal that is whole."""
        settle(Stored(image.source))

    def claim(self, image: ImageRef, owner: Owner) -> Owner | None:
        """Write a record beside the image."""
        from . import commit as dir_commit

        return dir_commit.claim(image, owner)

    def owner(self, image: ImageRef) -> Owner | None:
        """Read it."""
        stored = Stored(image.source)
        try:
            beneath.status(stored.datastore, dir_names.owner(stored.below))
        except FileNotFoundError:
            return None  # of most images, for which nothing more is to be loaded
        except OSError:
            pass
        from . import commit as dir_commit

        return dir_commit.owner(image)

    def disown(self, image: ImageRef, owner: Owner) -> None:
        """Remove it."""
        from . import commit as dir_commit

        dir_commit.disown(image, owner)

    def may_commit(self, image: ImageRef, owner: Owner) -> None:
        """Compare its record with it."""
        from . import commit as dir_commit

        dir_commit.may_commit(image, owner)

    def commit(self, image: ImageRef, owner: Owner, diff: Diff) -> Committed:
        """Make the new content beside the image, or note beside it what is to be written, and end that."""
        from . import commit as dir_commit

        return dir_commit.commit(image, owner, diff)

    def note_epoch(self, image: ImageRef, vm: int, epoch: int) -> None:
        """Write a file for the whole store."""
        from . import epochs

        marker.check(image.root, image.access.marker)
        epochs.note(image, vm, epoch)

    def epoch(self, image: ImageRef, vm: int) -> int:
        """Read that file."""
        from . import epochs

        return epochs.read(image, vm)
