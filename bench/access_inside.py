# SPDX-License-Identifier: Apache-2.0
"""What access.py has a client do, on a host or in a guest: files written, read, made, looked up, removed.
Orders in, answers out.

Run by `python3 -I`, so nothing of this repository is imported. Where seconds are answered, they are by the
client's own clock.
"""

import json
import os
import sys
import time
import zlib

MiB = 1 << 20
"""A transfer, as the paper's."""


def mark(seed, number):
    """Return the 16 bytes that a MiB of a file begins with, and no other MiB of the run."""
    return b"%8d%8d" % (seed, number)


def write(path, seed, mib):
    """Write a new file, in transfers of 1 MiB, until it is stored; return the seconds."""
    data = bytearray(os.urandom(MiB))
    began = time.monotonic()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    for number in range(mib):
        data[:16] = mark(seed, number)
        if os.write(fd, data) != MiB:
            raise RuntimeError(f"{path}: a transfer was cut short")
    os.fsync(fd)
    os.close(fd)
    return time.monotonic() - began


def read(path, seed, mib):
    """Read such a file; return the seconds."""
    data = bytearray(MiB)
    began = time.monotonic()
    fd = os.open(path, os.O_RDONLY)
    for number in range(mib):
        if os.readv(fd, [data]) != MiB or data[:16] != mark(seed, number):
            raise RuntimeError(f"{path}: MiB {number} is not what was written")
    os.close(fd)
    return time.monotonic() - began


def create(folder, count):
    """Make so many empty files; return the seconds."""
    began = time.monotonic()
    for number in range(count):
        os.close(os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    return time.monotonic() - began


def stat(folder, count):
    """Look all of them up; return the seconds."""
    began = time.monotonic()
    for number in range(count):
        os.stat(f"{folder}/{number}")
    return time.monotonic() - began


def unlink(folder, count):
    """Remove all of them; return the seconds."""
    began = time.monotonic()
    for number in range(count):
        os.unlink(f"{folder}/{number}")
    return time.monotonic() - began


def make(folder):
    os.mkdir(folder)


def remove(folder):
    """Remove a folder with the files in it."""
    for name in os.listdir(folder):
        os.unlink(f"{folder}/{name}")
    os.rmdir(folder)


def checksum(mib):
    """Return the seconds that a CRC-32 of so many MiB takes: how fast the processor is."""
    data = bytes(MiB)
    began = time.monotonic()
    for _ in range(mib):
        zlib.crc32(data)
    return time.monotonic() - began


for number, order in enumerate(sys.stdin):
    words = json.loads(order)
    print(json.dumps(globals()[words[0]](*words[1:])), f"== {number}", sep="\n", flush=True)
