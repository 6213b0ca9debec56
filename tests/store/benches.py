# SPDX-License-Identifier: Apache-2.0
"""The kinds of stores that there are, each with its real tools: a directory of this machine, and a Ceph
cluster of its own.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Iterator

from lab import forks
from semishared.model.refs import ImageRef
from semishared.model.store.access import Access
from semishared.store.dir import marker
from tools.test_writers import exported

if TYPE_CHECKING:
    from tools.ceph_site import Site

TESTS = Path(__file__).resolve().parents[1]
MARKER = "0123456789abcdef" * 2


def killed_replacing(image: ImageRef, size: int, path: Path) -> None:
    """Start a process that kills itself where new content is all there, and not yet the image's."""
    job = path.with_suffix(".job")
    job.write_bytes(pickle.dumps((image, size, str(path))))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "lib")])}
    done = subprocess.run(
        [*forks.words("store.half"), job], env=env, capture_output=True, check=False, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def convert(name: str, target: Path, *words: str) -> None:
    subprocess.run(["qemu-img", "convert", *words, "-O", "raw", name, target], check=True, timeout=120)


@contextmanager
def reflinking(top: Path) -> Iterator[Path]:
    """Yield a directory on a file system of its own that clones files."""
    file, where = top / "xfs", top / "mounted"
    with open(file, "wb") as made:
        made.truncate(1 << 30)
    where.mkdir()
    subprocess.run(["mkfs.xfs", "-q", file], check=True, timeout=300)
    subprocess.run(["mount", "-o", "loop", file, where], check=True, timeout=300)
    try:
        yield where
    finally:
        subprocess.run(["umount", where], check=True, timeout=300)
        file.unlink()


class DirBench:
    """A directory that nothing else is in, marked."""

    outlives_processes = True

    def __init__(self, top: Path) -> None:
        self.root = str(top / "100")
        os.mkdir(self.root)
        marker.write(self.root, MARKER)
        self.access = Access(marker=MARKER, cloud="f" * 32)

    def write(self, source: str, offset: int, data: bytes) -> None:
        """Write a pattern by QEMU: a clone is a qcow2 file, an image is raw."""
        command = f"write -P {data[0]} {offset} {len(data)}"
        subprocess.run(
            ["qemu-io", "-f", self._format(source), "-c", command, source],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=300,
        )

    def read(self, source: str, offset: int, count: int) -> bytes:
        """Read by way of a raw copy."""
        target = Path(f"{self.root}.read")
        convert(source, target, "-f", self._format(source))
        return target.read_bytes()[offset : offset + count]

    def _format(self, source: str) -> str:
        return "qcow2" if "/clones/" in source else "raw"

    def through(self, name: str, target: Path) -> None:
        """Read what qemu-img opens."""
        convert(name, target, "-f", "raw")

    @contextmanager
    def writing(self, source: str) -> Iterator[None]:
        """Let a QEMU have the file open."""
        with exported(source, "raw"):
            yield

    def killed_replacing(self, image: ImageRef, size: int, path: Path) -> None:
        """Kill a process."""
        killed_replacing(image, size, path)


class RbdBench:
    """A pool that nothing else is in."""

    outlives_processes = True

    def __init__(self, site: Site) -> None:
        self._site = site
        self.root, self.access = "one", site.access

    def write(self, source: str, offset: int, data: bytes) -> None:
        """Write as another client."""
        self._site.write(source.split("/")[1], offset, data)

    def read(self, source: str, offset: int, count: int) -> bytes:
        """Read as another client."""
        return self._site.read(source.split("/")[1], offset, count)

    def through(self, name: str, target: Path) -> None:
        """Read what qemu-img opens."""
        convert(name, target, "-f", "raw")

    @contextmanager
    def writing(self, source: str) -> Iterator[None]:
        """Hold the exclusive lock, as who has written does."""
        import rbd

        with rbd.Image(self._site.ioctx, source.split("/")[1]) as guest:
            guest.write(b"\xa1" * 512, 1 << 20)
            yield

    def killed_replacing(self, image: ImageRef, size: int, path: Path) -> None:
        """Kill a process: the cluster goes on seeing it for a while."""
        killed_replacing(image, size, path)
