# SPDX-License-Identifier: Apache-2.0
"""One cloud for all tests of VMs: two hosts, two system datastores."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Callable

import pytest

from lab import connections
from lab.cloud import Cloud
from lab.guest import content

PLACES: dict[str, dict[str, Any]] = {
    "overlay": {},
    "copy": {"SEMISHARED_LOCAL": "copy"},
    "remote-first": {"SEMISHARED_LOCAL": "remote-first"},
    "store-clone": {"SEMISHARED_PLACE": "shared"},
}


@pytest.fixture(scope="session")
def cloud() -> Iterator[Cloud]:
    with Cloud.up(hosts=2, systems=(101, 102), installs=True) as up:
        connections.share(up.lab)
        yield up


@pytest.fixture(scope="session")
def os_image(cloud: Cloud) -> int:
    """What VMs of all files boot from: it is uploaded, and staged on each host, once."""
    return cloud.os_image()


@pytest.fixture(scope="session")
def image_for(cloud: Cloud) -> Callable[[str, str], int]:
    """Images that are not persistent, one for each place and format: they are uploaded, and staged on each
    host, once for all files.
    """

    @cache
    def made(place: str, format: str) -> int:
        return cloud.data_image(
            f"{place}-{format}-for-all", content("base", 0, 1024), format=format, **PLACES[place]
        )

    return made


@pytest.fixture(autouse=True)
def only_this_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remove the VMs that a failing test leaves, so that the next one is judged for itself."""
    yield
    if "cloud" in request.fixturenames and not {"hot", "own"} & set(request.fixturenames):
        cloud = request.getfixturevalue("cloud")
        cloud.delete_all()


@pytest.fixture(scope="session")
def figure() -> Iterator[Callable[[str, object], None]]:
    """Return a function that notes a figure for build/report.json."""
    figures: dict[str, object] = {}
    yield figures.__setitem__
    path = os.environ.get("SEMISHARED_FIGURES")
    if path and figures:
        Path(path).write_text(json.dumps(figures))
