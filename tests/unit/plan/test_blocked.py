# SPDX-License-Identifier: Apache-2.0
"""Whom to block in a Ceph cluster, by cases: plan/fence/<situation>.json says what is known and what is
decided from it.

    host        the host to be shut out
    told        host -> addresses that its monitoring told
    front_end   addresses of the front-end
    openers     [image, client, address] of who has an image of the cluster open
    daemons     addresses of OSDs
    images      images of the cluster
    bridges     hosts that may open any image
    disks       images that guests of the host may have open for writing
    entries     who is to be on the blocklist
    missing     why that would not be all of the host

REGENERATE=1 rewrites the last two; read the difference before it is committed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from semishared.model.store.rbd_names import Ceph, Opener
from semishared.plan.care import fence

CASES = sorted((Path(__file__).parent / "fence").glob("*.json"))


def decided(case: dict[str, Any]) -> dict[str, list[str]]:
    openers = tuple(Opener(*words) for words in case.get("openers", ()))
    cluster = Ceph(
        "f", openers, *(frozenset(case.get(name, ())) for name in ("daemons", "images", "bridges"))
    )
    told = {host: frozenset(addresses) for host, addresses in case["told"].items()}
    found = fence.blocks(
        cluster, fence.Machines(case["host"], told, frozenset(case["front_end"])), case["disks"]
    )
    return {"entries": list(found.entries), "missing": list(found.missing)}


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_who_is_blocked_is_what_the_case_says(path: Path) -> None:
    case = json.loads(path.read_text())
    found = decided(case)
    if os.environ.get("REGENERATE"):  # pragma: no cover - by hand
        from conftest import WATCH  # type: ignore[attr-defined] # that of tests/unit

        WATCH.active = False
        path.write_text(json.dumps({**case, **found}, indent=1) + "\n")
        pytest.skip("rewritten")
    assert found == {name: case[name] for name in ("entries", "missing")}


def test_there_are_cases_of_a_proof_and_of_what_is_none() -> None:
    cases = [json.loads(path.read_text()) for path in CASES]
    assert (
        {bool(case["missing"]) for case in cases}
        == {True, False}
        == {bool(case["entries"]) for case in cases}
    )
