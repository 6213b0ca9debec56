# SPDX-License-Identifier: Apache-2.0
"""What `semishared base` says at the end; the hosts are made up."""

from __future__ import annotations

import argparse
from typing import Any, Callable

import pytest

from semishared.cli import base, command
from semishared.errors import BadArguments
from semishared.model.base.steps import EvictedBase, HeldBase, Listed
from semishared.opennebula.xml import Host, Image

NAMED = ((7, "debian"), (8, "debian"), (9, "7"))


class Command:
    """One run on a host with one base."""

    def __init__(self, leases: list[str], *, dry_run: bool, goes: bool) -> None:
        self.arguments, self.goes = argparse.Namespace(dry_run=dry_run), goes
        held = HeldBase(f"100-7-{'a' * 32}", 5, 1, 1, tuple(leases), 5, False, "")
        self.listed = Listed([held], 0, 0, 0)

    def about(self, found: HeldBase) -> bool:
        return True

    def on_hosts(self, work: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
        return work(self, Host.parse("<HOST><NAME>h1</NAME></HOST>"), "/root", self.listed)

    def ask(self, step: object) -> EvictedBase:
        """Answer as the session with the host."""
        assert not self.arguments.dry_run, "nothing is changed"
        return EvictedBase(self.goes, 5)


@pytest.mark.parametrize(
    ("leases", "dry_run", "goes", "said", "code"),
    [
        ([], True, False, "would be removed, 5 B", 0),
        (["5-0"], True, False, "stays: leased by disks 5-0", 1),
        ([], False, True, "removed, 5 B", 0),
        (["5-0"], False, False, "stays: leased by disks 5-0", 1),
        ([], False, False, "stays: leased by disks taken just now", 1),
    ],
)
def test_evict_fails_for_a_base_that_is_leased_and_its_dry_run_says_so(
    leases: list[str], dry_run: bool, goes: bool, said: str, code: int
) -> None:
    command: Any = Command(leases, dry_run=dry_run, goes=goes)
    (row,), line, found = base.evict(command)
    assert (line(row), found) == (said, code)


def test_those_are_due_that_were_not_read_for_longest() -> None:
    day, now = 86400, 100 * 86400
    ages = {"a": (40, 20), "b": (16, 0), "c": (90, 14), "d": (99, 30), "e": (3, 0)}
    bases = [
        HeldBase(
            f"100-7-{name * 32}",
            5,
            now - staged * day,
            1,
            (),
            5,
            False,
            "",
            verified=now - read * day if read else 0,
        )
        for name, (staged, read) in ages.items()
    ]
    names = lambda found: "".join(one.name[-1] for one in found)  # noqa: E731
    assert names(base.to_read(bases, True, now)) == "dab"
    assert names(base.to_read(bases, False, now)) == "dabce"


def test_word_that_names_no_image_is_refused() -> None:
    known = [Image.parse(f"<IMAGE><ID>{number}</ID><NAME>{name}</NAME></IMAGE>") for number, name in NAMED]
    assert [one.id for one in command.called(known, "7", "image")] == [7, 9]
    with pytest.raises(BadArguments, match="no image 'deb' in OpenNebula"):
        command.called(known, "deb", "image")
