# SPDX-License-Identifier: Apache-2.0
"""Commit a diff to its image in a process of its own, which is killed where SEMISHARED_KILL_AT says.

python3 -m store.committing FILE      FILE: (image, owner, diff), pickled; exit code 1: an error, which is
printed
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from semishared import store
from semishared.errors import SemisharedError
from semishared.model.refs import ImageRef, Owner
from semishared.store.commit.claims import Committed, Diff


def commit(image: ImageRef, owner: Owner, diff: Diff) -> Committed:
    """Commit as an action does: settle, on the bridge if there is one, and on the host; and settle, as who
    comes next.
    """
    at = store.of(image.access)
    at.settle(image)
    done = at.commit(image, owner, diff)
    at.settle(image)
    return done


if __name__ == "__main__":
    try:
        commit(*pickle.loads(Path(sys.argv[1]).read_bytes()))
    except SemisharedError as e:
        sys.exit(e.line())
