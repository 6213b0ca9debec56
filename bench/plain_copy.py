#!/usr/bin/python3 -I
# SPDX-License-Identifier: Apache-2.0
"""The plain copy that a base from a peer is compared with: one TCP stream, or what a pipe brings; written,
hashed, synced.

Who receives says the hash, and the seconds from the connection on until it is on the disk.

plain_copy.py send FILE PORT      plain_copy.py receive HOST PORT FILE      plain_copy.py take FILE < ...
"""

import hashlib
import os
import socket
import sys
import time

PIECE = 1 << 20


def send(path, port):
    with socket.create_server(("", int(port))) as server, open(path, "rb") as file:
        connection, _ = server.accept()
        with connection:
            connection.sendfile(file)


def receive(host, port, path):
    for _ in range(500):
        try:
            connection = socket.create_connection((host, int(port)))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    with connection:
        kept(connection.recv_into, path)


def take(path):
    with open(0, "rb", buffering=0) as pipe:
        kept(pipe.readinto, path)


def kept(read, path):
    started = time.monotonic()
    found, memory = hashlib.sha256(), memoryview(bytearray(PIECE))
    with open(path, "wb", buffering=0) as file:
        while count := read(memory):
            found.update(memory[:count])
            file.write(memory[:count])
        os.fsync(file.fileno())
    print(found.hexdigest(), time.monotonic() - started)


{"send": send, "receive": receive, "take": take}[sys.argv[1]](*sys.argv[2:])  # type: ignore[operator] # they differ in what they take
