# SPDX-License-Identifier: Apache-2.0
"""Manifests in the metadata of an image: whole or not there, whatever a killed writer has left."""

from __future__ import annotations

import hashlib
from typing import Dict, List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.model.store import rbd_names
from semishared.store.rbd import content
from semishared.tools.extents import Manifest


class Metadata:
    """The metadata of an image; what librbd does with it the suites with Ceph show."""

    def __init__(self) -> None:
        self.kept: Dict[str, str] = {"conf_x": "1"}
        self.left = 1 << 30

    def metadata_list(self) -> List[Tuple[str, str]]:
        return list(self.kept.items())

    def metadata_set(self, key: str, value: str) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self.kept[key] = value

    def metadata_remove(self, key: str) -> None:
        del self.kept[key]


def manifest(count: int, seed: str) -> Manifest:
    return Manifest(
        "raw", count << 22, {at: hashlib.sha256(f"{seed}{at}".encode()).hexdigest() for at in range(count)}
    )


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_the_last_one_is_there_and_nothing_of_the_one_before(first: int, second: int) -> None:
    image = Metadata()
    for count in (first, second):
        content.write_manifest(image, manifest(count, "a"))
    assert content.read_manifest(image, manifest(second, "a").generation) == manifest(second, "a")
    assert first == second or content.read_manifest(image, manifest(first, "a").generation) is None
    again = Metadata()
    content.write_manifest(again, manifest(second, "a"))
    assert image.kept == again.kept


@given(st.integers(0, 12))
def test_a_killed_writer_leaves_the_old_the_new_or_none(left: int) -> None:
    image, old, new = Metadata(), manifest(2500, "old"), manifest(2600, "new")
    content.write_manifest(image, old)
    image.left = left
    try:
        content.write_manifest(image, new)
    except KeyboardInterrupt:
        pass
    assert content.read_manifest(image, new.generation) in (None, new) and content.read_manifest(
        image, old.generation
    ) in (None, old)


@given(st.text(max_size=30), st.text(max_size=30))
def test_anything_else_is_none(head: str, piece: str) -> None:
    image = Metadata()
    image.kept.update({rbd_names.MANIFEST: head, rbd_names.manifest(0): piece})
    assert content.read_manifest(image, "0" * 32) is None
    image.kept[rbd_names.MANIFEST] = "0" * 32 + " 1"
    assert content.read_manifest(image, "0" * 32) is None


def test_one_that_is_too_large_is_not_kept() -> None:
    image = Metadata()
    content.write_manifest(image, manifest(300_000, "a"))
    assert image.kept == {"conf_x": "1"}


@pytest.mark.parametrize("count", ["²", "-1", "", "257", "9" * 5000, "1 1"])
def test_odd_counts_are_the_manifest_of_nothing(count: str) -> None:
    image, made = Metadata(), manifest(3, "a")
    content.write_manifest(image, made)
    image.kept[rbd_names.MANIFEST] = f"{made.generation} {count}"
    assert content.read_manifest(image, made.generation) is None
