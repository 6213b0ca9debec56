# SPDX-License-Identifier: Apache-2.0
"""The key by which front-ends recognise their own notes: a file of 64 digits with mode 0600.

Nothing of semishared is imported here: install/examine.py sends this to other front-ends of an HA group,
within preflight.py.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from typing import Dict, Sequence, Tuple

DIGITS = re.compile(rb"[0-9a-f]{64}\n?\Z")
MISSING = "is missing"


def look(path: str) -> Tuple[bytes, str]:
    """Return the key at `path` and '', else b'' and why it is not usable. No link is followed to it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return b"", MISSING
    except OSError as e:
        return b"", f"cannot be read: {e.strerror}"
    try:
        status, text = os.fstat(fd), b""
        if stat.S_ISREG(status.st_mode):
            text = os.read(fd, 100)
    except OSError as e:
        return b"", f"cannot be read: {e.strerror}"
    finally:
        os.close(fd)
    if status.st_uid != os.geteuid():
        return b"", f"belongs to user {status.st_uid}, not to the one who goes by it ({os.geteuid()})"
    if status.st_mode & 0o077:
        return b"", f"has mode {stat.S_IMODE(status.st_mode):o}: others may read or change it"
    if not DIGITS.match(text):
        return b"", "is damaged: it is no key"
    return text.strip(), ""


def make(path: str) -> None:
    """Make a key at `path` atomically; raise FileExistsError if there is one, OSError."""
    staged = f"{path}.{os.getpid()}"
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, f"{secrets.token_hex(32)}\n".encode())
        os.fchmod(fd, 0o600)
        os.fsync(fd)
        os.link(staged, path)
    finally:
        os.close(fd)
        os.unlink(staged)


def code(key: bytes, words: Sequence[str]) -> str:
    """Return the code of words; only an owner of the key can compute it."""
    # Each word has a length prefix: two different lists never give the same text.
    return hmac.new(
        key, "".join(f"{len(word)}:{word}" for word in words).encode("utf-8", "surrogatepass"), hashlib.sha256
    ).hexdigest()


def compared(path: str, word: str) -> Dict[str, str]:
    """Return why the key at `path` is unusable, and its code of a word, by which two keys are compared."""
    key, why = look(path)
    return {"why_not": why, "code": code(key, ["compared", word]) if key else ""}


def is_right(key: bytes, words: Sequence[str], said: str) -> bool:
    return hmac.compare_digest(code(key, words).encode(), said.encode("utf-8", "surrogatepass"))
