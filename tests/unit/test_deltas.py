# SPDX-License-Identifier: Apache-2.0
"""Disks and their deltas, in temporary directories."""

from __future__ import annotations

import pytest

from semishared.guest import active_layer
from semishared.model.disk.place import COPY
from semishared.model.disk.record import Record

DISK = "/var/lib/one/datastores/101/5/disk.1"


@pytest.mark.parametrize(
    ("record", "raw"),
    [
        (Record(1, COPY, "raw", f"{DISK}.snap/3"), 3),
        (Record(1, COPY, "qcow2", f"{DISK}.snap/3"), None),
        (Record(1, COPY, "qcow2", f"{DISK}.snap/3", raw_layer=0), 0),
    ],
)
def test_a_disk_with_a_delta_has_the_raw_layer_that_it_had(record: Record, raw: int | None) -> None:
    """The guest wrote that one from its first byte: were it probed, it could name any file as what it lies
    over.
    """
    found = active_layer.with_delta(record)
    assert (found.path, found.format, found.raw_layer) == (active_layer.delta_of(record), "qcow2", raw)
