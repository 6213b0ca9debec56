# SPDX-License-Identifier: Apache-2.0
"""Begin to replace the content of an image, in a process of its own, and die when the new content is there.

python3 -m store.half FILE      FILE: (image, size, path of a raw file), pickled
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path

from semishared import store

if __name__ == "__main__":
    image, size, path = pickle.loads(Path(sys.argv[1]).read_bytes())
    with store.of(image.access).replaced(image, size) as draft:
        draft.fill(path, "raw")
        os.kill(os.getpid(), signal.SIGKILL)
