# SPDX-License-Identifier: Apache-2.0
"""docs/how-to/install-packages.md, followed: installed, upgraded from an older version, removed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from packages.packaged import PAGE, REMOTES, Root, built, on_page, repacked
from semishared import VERSION


@pytest.mark.parametrize("release", [12, 13])
def test_page_is_followed(release: int, tmp_path: Path) -> None:
    root, package = Root(release, tmp_path / "root"), built("deb")[0]
    before, target = root.opennebula(), root.changed / package.name
    older = repacked(package, tmp_path, "0.1.9")
    said = {}
    for part, source in (("install", older), ("upgrade", package), ("remove", package)):
        shutil.copy(source, target)
        for command in on_page(part):
            # Which VMs there are is not known without oned, and asked for before the drivers go.
            words = [*command.split(), *(["--force"] if "--uninstall" in command else [])]
            said[command] = root.run(*words)
        if part == "install":
            assert "0.1.9" in root.run("semishared", "--version")
    assert f"replace /{REMOTES}/etc/semishared.conf" in said["/usr/share/semishared/install.sh"]
    assert {name: text for name, text in root.opennebula().items() if "semishared-2" not in name} == before


def test_versions_on_the_page_are_those_that_are_built() -> None:
    text = PAGE.read_text()
    for how in ("deb", "rpm"):
        for package in built(how):
            assert package.name in text, package.name
    assert f"semishared-{VERSION}.tar.xz" in text and len(text.splitlines()) <= 200
