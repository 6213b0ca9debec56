# SPDX-License-Identifier: Apache-2.0
"""Nodes of the lab have the programs of the release that they are said to have, and those alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lab import Node, roots
from lab.cloud import Cloud


def release(etc: Path) -> str:
    """Return the number of a Debian release, by the file that says it."""
    return (etc / "debian_version").read_text().partition(".")[0].strip()


def test_each_node_has_the_programs_and_the_configuration_of_its_release(cloud: Cloud) -> None:
    wanted = roots.platform(os.environ.get(roots.PLATFORM, "mixed"), 2)
    for node in (cloud.lab.fe, *cloud.lab.hosts):
        mine = wanted.get(node.name)
        expected = release(Path("/etc")) if mine is None else str(mine)
        assert release(node.path("/etc")) == expected
        assert os.path.samestat(node.path("/usr").stat(), (roots.of(mine) / "usr").stat())


def qemu(node: Node) -> tuple[str, ...]:
    """Return the versions of a host's libvirt and of the QEMU that it starts guests with."""
    said = node.run(["virsh", "-c", "qemu:///system", "version"]).stdout.decode().splitlines()
    return tuple(line.split()[-1] for line in said if line.startswith(("Using library", "Running")))


def test_libvirt_starts_the_qemu_of_its_release(cloud: Cloud) -> None:
    first, second = (qemu(host) for host in cloud.lab.hosts)
    assert len(first) == len(second) == 2
    assert (first == second) == (cloud.lab.machine == "pc")


def test_a_root_that_was_not_made_is_named_with_what_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roots, "FOLDER", tmp_path)
    with pytest.raises(RuntimeError, match="make platform-root RELEASE=11"):
        roots.of(11)
    assert roots.of(None) == roots.MACHINE
