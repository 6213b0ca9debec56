# SPDX-License-Identifier: Apache-2.0
"""The domain XML of a checkpoint, read without libvirt: a host may have written anything into that file."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from semishared.guest import machine
from semishared.model.vm.move_steps import GuestMachine

XML = (
    b"<domain type='kvm'><os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os>"
    b"<devices><emulator>/usr/bin/qemu</emulator></devices></domain>"
)
NOTHING = ("", "", "", "", "")
GROWS = b"<!DOCTYPE d [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;'>]>" + XML.replace(b"hvm", b"&b;")


def checkpoint(magic: bytes, length: int, text: bytes) -> bytes:
    """Return libvirt's header (virQEMUSaveHeader: 16 bytes, 5 numbers and 14 unused), and what follows it."""
    return struct.pack("=16s2I68x", magic, 2, length) + text + b"\0" * 32 + b"memory"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (
            checkpoint(b"LibvirtQemudSave", len(XML) + 32, XML),
            ("kvm", "x86_64", "pc-q35-7.2", "/usr/bin/qemu", ""),
        ),
        (checkpoint(b"LibvirtQemudPart", len(XML) + 32, XML), NOTHING),
        (checkpoint(b"LibvirtQemudSave", machine.MOST_XML + 1, XML), NOTHING),
        (checkpoint(b"LibvirtQemudSave", len(XML) // 2, XML), NOTHING),
        (checkpoint(b"LibvirtQemudSave", len(GROWS) + 32, GROWS), NOTHING),
        (checkpoint(b"LibvirtQemudSave", 9, b"\xff\xfe<x/>"), NOTHING),
        (checkpoint(b"LibvirtQemudSave", 9, b""), NOTHING),
        (b"LibvirtQemudSave", NOTHING),
        (b"", NOTHING),
    ],
    ids=["whole", "half saved", "too long", "cut", "entities", "no UTF-8", "empty", "short", "nothing"],
)
def test_machine_of_a_checkpoint(tmp_path: Path, content: bytes, found: tuple[str, ...]) -> None:
    (tmp_path / "checkpoint").write_bytes(content)
    assert machine.seen(str(tmp_path), "") == GuestMachine(*found)
