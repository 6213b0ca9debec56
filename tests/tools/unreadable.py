# SPDX-License-Identifier: Apache-2.0
"""A file that answers every read with EIO: QEMU's own error injection (blkdebug), through FUSE over the file."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator


@contextmanager
def eio(*paths: Path) -> Iterator[None]:
    """Have each read of the files at these paths fail within the block; what was at them is as before afterwards."""
    bad = '{"driver":"blkdebug","node-name":"bad","image":"none","inject-error":[{"event":"none","iotype":"read","errno":5}]}'
    argv = ["qemu-storage-daemon", "--blockdev", "driver=null-co,node-name=none,size=4096,read-zeroes=on", "--blockdev", bad]
    for number, path in enumerate(paths):
        argv += ["--export", f"type=fuse,id=of{number},node-name=bad,mountpoint={path},writable=off"]
    own = {path: os.stat(path).st_dev for path in paths}
    with subprocess.Popen(argv) as daemon:
        try:
            deadline = time.monotonic() + 20
            while any(os.stat(path).st_dev == device for path, device in own.items()):
                assert daemon.poll() is None and time.monotonic() < deadline
                time.sleep(0.005)
            yield
        finally:
            daemon.terminate()
            daemon.wait(20)
