# SPDX-License-Identifier: Apache-2.0
"""What became of a step of many that raises nothing: the others are to be done all the same, and each is told
of.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import Dict, Iterator

from ..errors import SemisharedError


@contextmanager
def told(**answer: object) -> Iterator[Dict[str, object]]:
    """Yield the answer to a step, which the block fills in; with it are the "seconds" that the block took,
    and what was wrong.

    "error" is the line of a SemisharedError or OSError that ends the block, with its "id"; '' and '' when
    there is none.
    """
    began = time.monotonic()
    answer.update(error="", id="")
    try:
        yield answer
    except SemisharedError as e:
        answer.update(error=e.line(), id=e.id)
    except OSError as e:
        answer.update(error=f"on {os.uname().nodename}: {e}", id="SS012")
    answer["seconds"] = round(time.monotonic() - began, 2)
