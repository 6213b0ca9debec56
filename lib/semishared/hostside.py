# SPDX-License-Identifier: Apache-2.0
"""What ssh starts on a host. host/service.py does the work.

What is started is compiled every time, what it imports once.
"""

import gc
import os
import sys

if __package__ in (None, ""):
    sys.path += [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
# What is loaded stays: looking through it for garbage again and again was a twentieth of the start.
gc.set_threshold(50_000)

from semishared.host.service import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
