# SPDX-License-Identifier: Apache-2.0
"""What libvirt says of a domain while a test goes on."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Callable, Iterator

from lab import Node

VIRSH = ["virsh", "-q", "-c", "qemu:///system"]
HEARD = "/var/tmp/events"


@contextmanager
def events(node: Node, domain: str) -> Iterator[Callable[[], str]]:
    """Yield what returns the events of a domain since. Its listener listens: it has heard of a change that
    was made for that.
    """
    path = node.path(HEARD)
    path.unlink(missing_ok=True)
    # virsh before 7.1 writes nothing out until it has a block of 4 KiB to say.
    words = " ".join(["stdbuf", "-oL", "virsh", *VIRSH[2:], "event", "--domain", domain, "--all", "--loop"])
    change = [*VIRSH, "metadata", domain, "--live", "--uri", "urn:semishared:listening", "--key", "listening"]
    with node.popen(["bash", "-c", f"exec {words} >{HEARD} 2>&1"]) as listener:
        try:
            deadline = time.monotonic() + 60
            while not path.exists() or "metadata-change" not in path.read_text():
                assert time.monotonic() < deadline and listener.poll() is None, "nobody listens"
                node.run([*change, "--set", "<listens/>"])
                time.sleep(0.1)
            node.run([*change, "--remove"])
            yield path.read_text
        finally:
            listener.kill()
