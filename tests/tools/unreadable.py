# SPDX-License-Identifier: Apache-2.0
"""Files that answer every read with EIO: QEMU's own error injection (blkdebug), through FUSE over them; or
that cannot even be asked.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from semishared.tools import mounts


@contextmanager
def eio(*paths: Path) -> Iterator[None]:
    """Have each read of the files at these paths fail within the block; what was at them is as before
    afterwards.
    """
    with _over(*paths):
        yield


@contextmanager
def dead(*paths: Path) -> Iterator[None]:
    """Have nobody able to tell within the block whether the files at these paths are there: whose file system
    they are is gone.
    """
    with _over(*paths) as daemon:
        daemon.kill()
        daemon.wait(20)
        try:
            while any(map(_answers, paths)):
                time.sleep(0.02)  # the kernel remembers for a second what it was told last
            yield
        finally:
            for path in paths:
                subprocess.run(["umount", "--lazy", str(path)], check=True)


def _answers(path: Path) -> bool:
    try:
        os.lstat(path)
    except OSError as e:
        assert e.errno == errno.ENOTCONN
        return False
    return True


@contextmanager
def _over(*paths: Path) -> Iterator[subprocess.Popen[bytes]]:
    bad = '{"driver":"blkdebug","node-name":"bad","image":"none","inject-error":[{"event":"none","iotype":"read","errno":5}]}'  # noqa: E501
    argv = [
        "qemu-storage-daemon",
        "--blockdev",
        "driver=null-co,node-name=none,size=4096,read-zeroes=on",
        "--blockdev",
        bad,
    ]
    for number, path in enumerate(paths):
        argv += ["--export", f"type=fuse,id=of{number},node-name=bad,mountpoint={path},writable=off"]
    with subprocess.Popen(argv) as daemon:
        try:
            deadline = time.monotonic() + 20
            while not {str(path.resolve()) for path in paths} <= {mount.point for mount in mounts.listed()}:
                assert daemon.poll() is None and time.monotonic() < deadline
                time.sleep(0.005)
            yield daemon
        finally:
            daemon.terminate()
            daemon.wait(20)
