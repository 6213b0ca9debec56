# SPDX-License-Identifier: Apache-2.0
"""The machine's packages for Python: libvirt's and Ceph's bindings are there, and nothing else that we use.

All of ours is started with -S: else each start looks through those packages, and loads what their .pth files
name, 2 to 10 ms.
"""

from __future__ import annotations

import os
import sys


def reach() -> None:
    """Let this process import them: for right before such an import."""
    if sys.flags.no_site:
        import site

        sys.path += [path for path in site.getsitepackages() if path not in sys.path and os.path.isdir(path)]
