# SPDX-License-Identifier: Apache-2.0
"""Start ssh again a little later if sshd closed its connection before authentication.

sshd allows ten unauthenticated connections, and closes some of those beyond that (MaxStartups 10:30:100, the
default). oned starts as many actions at once as its drivers have threads, and repeats none of them.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import termios
from typing import Mapping, Sequence

from ..errors import SemisharedError
from ..tools.run import as_wide, run

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Longest pause before each attempt; each takes a random part of it, so that refused ones come one by one."""
SIGNS = ("kex_exchange_identification: ", "Connection closed by ", "Connection reset by ")
"""Messages of ssh: the server was there, and closed the connection before the key exchange."""
DEAF = ("Connection refused", "timed out", "No route to host")
"""Messages, also of a jump host's ssh, after which another attempt cannot help."""


def is_refusal(said: str, unread: int, written: int) -> bool:
    """Return True if sshd refused ssh, which exited with 255, and all bytes `written` to it are `unread`.

    ssh reads nothing before its session is established, so the host has received none of them.
    """
    if not any(sign in said for sign in SIGNS) or any(word in said for word in DEAF):
        return False
    return is_unread(unread, written)


def is_unread(unread: int, written: int) -> bool:
    """Return True if all bytes `written` to ssh are still `unread`."""
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
    """Start ssh in place of one that has `ended`, after a pause, with the same pipes."""
    assert ended.stdout
    os.ftruncate(stderr, 0)
    os.lseek(stderr, 0, os.SEEK_SET)
    pause_s *= 0.3 + 0.7 * int.from_bytes(os.urandom(2), "little") / 65536
    # The new process itself sleeps, so that the caller can read from other hosts meanwhile.
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


# ssh for bulk data: the cheapest cipher that the configuration of both sides allows, uncompressed. Only the
# order is ours. CPUs have had instructions for AES-GCM for long, and OpenSSH still prefers ChaCha20.


QUICKEST = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")


def ciphers_by_cost(allowed: Sequence[str]) -> list[str]:
    """Return the `allowed` ciphers, the quickest first."""
    return [
        *(name for name in QUICKEST if name in allowed),
        *(name for name in allowed if name not in QUICKEST),
    ]


def bulk_options(host: str) -> tuple[list[str], str]:
    """Return ssh's options for bulk data, and the name under which known_hosts has the host's key.

    Images are compressed before, if that pays (tools/compress.py).
    """
    found = ["-o", "Compression=no"]
    try:
        said = run(["ssh", "-G", "--", host])
    except SemisharedError:
        return found, host  # ssh itself will report the error
    words = dict(line.split(" ", 1) for line in said.splitlines() if " " in line)
    if "ciphers" in words:
        found += ["-o", f"Ciphers={','.join(ciphers_by_cost(words['ciphers'].strip().split(',')))}"]
    name, port = words.get("hostname", host), words.get("port", "22")
    return found, words.get("hostkeyalias") or (name if port == "22" else f"[{name}]:{port}")


ADDRESS_CONNECT_S = 3
"""Seconds until an ssh to a bulk address must stand: the way by the host's name is still there."""


def at_address(address: str, known_as: str) -> list[str]:
    """Return ssh's options to reach a host at an address, with the key that its name has: another machine
    that has the address is refused.
    """
    return ["-o", f"HostName={address}", "-o", f"HostKeyAlias={known_as}", "-o", "CheckHostIP=no"]
