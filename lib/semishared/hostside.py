# SPDX-License-Identifier: Apache-2.0
"""The program that ssh starts on a host; host/service.py does the work.

Python compiles it at every start, and what it imports once.
"""

import gc
import os
import sys

if __package__ in (None, ""):
    sys.path += [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
# Loaded code stays: looking through it for garbage was a twentieth of the start.
gc.set_threshold(50_000)

from semishared.host.service import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
