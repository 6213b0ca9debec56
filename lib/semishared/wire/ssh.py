# SPDX-License-Identifier: Apache-2.0
"""An ssh that its sshd has turned away before it knew who that is: begun again, a little later.

sshd lets ten connections at once say who they are, and of more it closes some as they come (MaxStartups
10:30:100, the default). oned starts as many actions at once as its drivers have threads, and asks for none of
them again.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import termios
from typing import Mapping, Sequence

from ..errors import SemisharedError
from ..tools.pipes import as_wide
from ..tools.run import run

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Before each new attempt, at most: some part of that, so that those which were turned away together come one
by one.
"""
SIGNS = ("kex_exchange_identification: ", "Connection closed by ", "Connection reset by ")
"""Words of ssh: the other side was there, and went before it agreed on keys."""
DEAF = ("Connection refused", "timed out", "No route to host")
"""Words of a jump host's ssh as well: there is nobody to ask again."""


def is_refusal(said: str, unread: int, written: int) -> bool:
    """Tell whether ssh, which ended with 255 and said that, was turned away with all of what was `written` to
    it still `unread`.

    ssh reads nothing before its session is there: so the host cannot have heard any of it.
    """
    if not any(sign in said for sign in SIGNS) or any(word in said for word in DEAF):
        return False
    left = fcntl.ioctl(unread, termios.FIONREAD, bytes(4))
    return int.from_bytes(left, "little") == written


def begun_again(
    ended: subprocess.Popen[bytes],
    pause_s: float,
    argv: Sequence[str],
    unread: int,
    stderr: int,
    env: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Start ssh in the place of one that has `ended`, after a pause: it hears and is heard by the same files
    as that one.
    """
    assert ended.stdout
    os.ftruncate(stderr, 0)
    os.lseek(stderr, 0, os.SEEK_SET)
    pause_s *= 0.3 + 0.7 * int.from_bytes(os.urandom(2), "little") / 65536
    # The pause is the new process's own: who reads from several hosts goes on with the others.
    words = ["/bin/sh", "-c", 'sleep "$0"; exec "$@"', f"{pause_s:.2f}", *argv]
    begun = subprocess.Popen(
        words, stdin=unread, stdout=subprocess.PIPE, stderr=stderr, env=env, start_new_session=True
    )
    assert begun.stdout
    as_wide(begun.stdout.fileno(), ended.stdout.fileno())
    os.dup2(begun.stdout.fileno(), ended.stdout.fileno(), inheritable=False)
    begun.stdout.close()
    begun.stdin, begun.stdout = ended.stdin, ended.stdout
    return begun


# How ssh carries bulk data: with the cipher that costs least of those that it may use, and not compressed.
#
# Which it may use is the affair of ssh's own configuration on both sides; only the order is ours. Processors
# have had instructions for AES and for GCM's multiplication for long, and OpenSSH prefers ChaCha20 all the
# same.


QUICKEST = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
OPTION = "ciphers "


def ciphers_by_cost(allowed: Sequence[str]) -> list[str]:
    """Return the ciphers that are allowed, the quickest first."""
    return [
        *(name for name in QUICKEST if name in allowed),
        *(name for name in allowed if name not in QUICKEST),
    ]


def cipher_options(host: str) -> list[str]:
    """Return what ssh to `host` is told. Images are compressed before, if that pays (tools/compress.py)."""
    found = ["-o", "Compression=no"]
    try:
        said = run(["ssh", "-G", "--", host])
    except SemisharedError:
        return found  # ssh will say itself what is wrong
    for line in said.splitlines():
        if line.startswith(OPTION):
            found += ["-o", f"Ciphers={','.join(ciphers_by_cost(line[len(OPTION) :].strip().split(',')))}"]
    return found
