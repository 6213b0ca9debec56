# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a lab have which Debian release, and what guests run on all of its hosts."""

from __future__ import annotations

import pytest

from lab import roots


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("", {}),
        ("11", {"fe": 11, "h1": 11, "h2": 11, "h3": 11}),
        ("mixed", {"fe": 13, "h2": 13}),
        ("ceph18", {"ceph": 13}),
        ("mixed+ceph18", {"fe": 13, "h2": 13, "ceph": 13}),
    ],
)
def test_a_platform_says_the_release_of_each_node(name: str, wanted: dict[str, int]) -> None:
    assert roots.platform(name, 3) == wanted


@pytest.mark.parametrize(
    ("releases", "wanted"),
    [
        ((None, None), "pc"),
        ((13, 13), "pc"),
        ((None, 13), "pc-i440fx-7.2"),
        ((13, 11, None), "pc-i440fx-5.2"),
    ],
)
def test_guests_have_the_machine_type_of_the_oldest_host(
    releases: tuple[int | None, ...], wanted: str
) -> None:
    assert roots.machine(releases) == wanted


@pytest.mark.reads_checkout
def test_a_release_has_what_is_listed_for_it_and_for_all() -> None:
    older, newer = (set(roots._packages(release)) for release in (11, 13))
    daemons = {"ceph-mon", "ceph-mgr", "ceph-osd", "ceph-mds", "ceph-fuse"}
    assert newer - older == {"virtiofsd", *daemons}
    assert "qemu-system-x86" in older and older < newer


def test_what_is_passed_on_of_apt_is_how_it_reaches_mirrors() -> None:
    lines = (
        'Acquire::Check-Valid-Until "false";',
        'Acquire::http::Proxy "http://proxy:3128";',
        'Acquire::Languages "none";',
        'APT::Architecture "amd64";',
    )
    assert [line for line in lines if roots.PASSED_ON.match(line)] == list(lines[:2])
