# SPDX-License-Identifier: Apache-2.0
"""Stands between libvirt's clients and the real libvirtd of a machine, and lets one verb of theirs go wrong.
Says "ready".

    libvirt_proxy.py SOCKET VERB before|after|never|slow|SECONDS

The call fails without reaching libvirtd (before), or having done its work (after); it is never answered
(never); the job that it begins has far to go (slow); and the client is killed so many seconds after libvirtd
has got it. All else passes to the byte. libvirt's packets: length, program, version, procedure, type, serial,
status; 32 bits each.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import sys
import threading
import time
from typing import Optional

LIBVIRTD = "/run/libvirt/libvirt-sock"
TABLE = "/usr/share/systemtap/tapset/libvirt_functions.stp"
"""libvirt's own list of its procedures, with their numbers."""
VERBS = {
    # virsh's verb: libvirt's procedure
    "backup-begin": "domain_backup_begin",
    "blockcommit": "domain_block_commit",
    "blockcopy": "domain_block_copy",
    "blockjob": "domain_block_job_abort",
    "blockpull": "domain_block_rebase",
    "domfsfreeze": "domain_fsfreeze",
    "domfsthaw": "domain_fsthaw",
    "resume": "domain_resume",
    "snapshot-create-as": "domain_snapshot_create_xml",
    "suspend": "domain_suspend",
}
REMOTE = 0x20008086
CALL, REPLY, ERROR = 0, 1, 1


def number_of(procedure: str) -> int:
    with open(TABLE, encoding="ascii") as file:
        text = file.read()
    found = re.search(rf'\(proc == (\d+)\) {{\s*procstr = "{procedure}";', text)
    assert found, procedure
    return int(found.group(1))


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">I", len(data)) + data + bytes(-len(data) % 4)


def failed(head: tuple[int, ...], text: str) -> bytes:
    """Return the answer to a call that libvirtd could not carry out."""
    _, program, version, procedure, _, serial, _ = head
    # An internal error of the QEMU driver: code, domain, message, level; no domain, strings, numbers,
    # network.
    body = struct.pack(">III", 1, 10, 1) + string(text) + struct.pack(">IIIIIIII", 2, 0, 0, 0, 0, 0, 0, 0)
    return struct.pack(">7I", 28 + len(body), program, version, procedure, REPLY, serial, ERROR) + body


def slowed(procedure: str, packet: bytes) -> bytes:
    """Return a call that begins a job, at 1 MiB/s."""
    if procedure == "domain_block_rebase":
        return packet[:-12] + struct.pack(">QI", 1, struct.unpack(">I", packet[-4:])[0])
    if procedure == "domain_block_copy":
        # An empty list of parameters and the flags end it.
        packet = (
            packet[:-8]
            + struct.pack(">I", 1)
            + string("bandwidth")
            + struct.pack(">IQ", 4, 1 << 20)
            + packet[-4:]
        )
        return struct.pack(">I", len(packet)) + packet[4:]
    return packet


def read(source: socket.socket) -> Optional[bytes]:
    data = b""
    while len(data) < 4 or len(data) < struct.unpack(">I", data[:4])[0]:
        wanted = (struct.unpack(">I", data[:4])[0] if len(data) >= 4 else 4) - len(data)
        try:
            part = source.recv(wanted)
        except OSError:
            return None
        if not part:
            return None
        data += part
    return data


class Client:
    """One connection through us."""

    def __init__(self, near: socket.socket, verb: str, how: str) -> None:
        self.verb, self.how, self.procedure = verb, how, VERBS[verb]
        self.number = number_of(self.procedure)
        self.near, self.far = near, socket.socket(socket.AF_UNIX)
        self.far.connect(LIBVIRTD)
        self.pid = struct.unpack("3i", near.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        self.held: dict[int, tuple[int, ...]] = {}
        for work in (self.forth, self.back):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        for end in (self.near, self.far):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def forth(self) -> None:
        while True:
            packet = read(self.near)
            if packet is None:
                return self.close()
            head = struct.unpack(">7I", packet[:28])
            if head[1] != REMOTE or head[3] != self.number or head[4] != CALL:
                self.far.sendall(packet)
            elif self.how == "before":
                self.near.sendall(failed(head, f"no mood for {self.verb}"))
            elif self.how == "after":
                self.held[head[5]] = head
                self.far.sendall(packet)
            elif self.how == "slow":
                self.far.sendall(slowed(self.procedure, packet))
            elif self.how != "never":
                self.held[head[5]] = head
                self.far.sendall(slowed(self.procedure, packet))
                time.sleep(float(self.how))
                os.kill(self.pid, signal.SIGKILL)

    def back(self) -> None:
        while True:
            packet = read(self.far)
            if packet is None:
                return self.close()
            _, program, _, _, type, serial, _ = struct.unpack(">7I", packet[:28])
            head = self.held.get(serial) if (program, type) == (REMOTE, REPLY) else None
            if head is None:
                self.near.sendall(packet)
            elif self.how == "after":
                self.near.sendall(failed(head, f"no mood for {self.verb}"))


def main() -> None:
    path, verb, how = sys.argv[1:]
    if os.path.exists(path):
        os.unlink(path)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(10)
    print("ready", flush=True)
    clients = []
    while True:
        near = server.accept()[0]
        try:
            clients.append(Client(near, verb, how))
        except OSError:
            near.close()  # libvirtd is away


if __name__ == "__main__":
    main()
