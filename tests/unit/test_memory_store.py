# SPDX-License-Identifier: Apache-2.0
"""The cases of tests/store, of a kind of store in memory: a kind is a class and its capabilities, and nobody
else knows it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semishared import store
from semishared.model.refs import ImageRef
from semishared.model.store import access as store_access
from store.cases import CASES
from unit.memory_store import KIND, MemoryBench, MemoryStore


@pytest.fixture(autouse=True)
def known_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(store_access.KINDS, KIND.name, KIND)
    monkeypatch.setitem(store.KINDS, KIND.name, MemoryStore)


@pytest.mark.parametrize("name", CASES)
def test_kind_in_memory(name: str, tmp_path: Path) -> None:
    bench = MemoryBench()
    if CASES[name].is_asked(bench):
        CASES[name].ask(bench, tmp_path)


def test_what_a_kind_cannot_be_asked_is_one_case() -> None:
    assert [name for name in CASES if not CASES[name].is_asked(MemoryBench())] == [
        "who is killed while replacing leaves what it was"
    ]


def test_an_image_of_any_kind_crosses_the_wire_and_finds_its_store() -> None:
    access = MemoryBench().access
    image = ImageRef(105, 7, "raw", "memory/7", access=access)
    assert isinstance(
        store.of(ImageRef.from_data(json.loads(json.dumps(image.to_data()))).access), MemoryStore
    )
