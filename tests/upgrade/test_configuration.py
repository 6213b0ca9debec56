# SPDX-License-Identifier: Apache-2.0
"""oned.conf and vmm_execrc that the older version has edited: upgraded, and after that as OpenNebula shipped
them again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Tuple

import pytest

import small_checkout
from configurations import VERSIONS, oned_conf, oned_reads, vmm_execrc
from lab import caches
from upgrade import versions

STOCK = caches.HERE / "stock"


@pytest.fixture(scope="module")
def older_installed(older: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a front-end with the files of the older version in place, for tests that look at configuration
    alone.
    """
    root = tmp_path_factory.mktemp("installed") / "root"
    front_end(root, VERSIONS[0])
    install(older, root, "--no-config")
    return root


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("older") / "tree"
    versions.lay_out(tree)
    return tree


def front_end(root: Path, version: str) -> Path:
    """Make a front-end below `root`, of a version of OpenNebula; return its remotes."""
    remotes = root / "var/lib/one/remotes"
    shutil.copytree(STOCK, remotes)
    (root / "etc/one/vmm_exec").mkdir(parents=True)
    configure(root, version)
    return remotes


def configure(root: Path, version: str) -> None:
    """Give it the configuration of a version."""
    (root / "var/lib/one/remotes/VERSION").write_text(f"{version}.0\n")
    (root / "etc/one/oned.conf").write_text(oned_conf(version))
    (root / "etc/one/vmm_exec/vmm_execrc").write_text(vmm_execrc(version))


def install(tree: Path, root: Path, *options: str) -> str:
    done = subprocess.run(
        [str(tree / "install.sh"), "--root", str(root), *options],
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def written(root: Path) -> Tuple[str, str]:
    return (root / "etc/one/oned.conf").read_text(), (root / "etc/one/vmm_exec/vmm_execrc").read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_upgrade_says_what_a_new_installation_says_and_leaves_without_a_trace(
    older: Path, older_installed: Path, tmp_path: Path, version: str
) -> None:
    upgraded, fresh, ours = tmp_path / "upgraded", tmp_path / "fresh", small_checkout.script().parent
    shutil.copytree(older_installed, upgraded, symlinks=True)
    configure(upgraded, version)
    front_end(fresh, version)
    shipped = written(upgraded)
    install(older, upgraded)
    install(ours, upgraded)
    install(ours, fresh)
    # That one is the administrator's; the older version could not do what it allows.
    found, wanted = (
        [
            (name, dict(value) if isinstance(value, dict) else value)
            for name, value in oned_reads(written(root)[0])
        ]
        for root in (upgraded, fresh)
    )
    own = [
        value
        for name, value in found
        if name == "TM_MAD_CONF" and isinstance(value, dict) and value["NAME"] == "semishared"
    ]
    assert [value.get("DS_LIVE_MIGRATE") for value in own] == ["NO"]
    own[0]["DS_LIVE_MIGRATE"] = "YES"
    assert found == wanted
    assert written(upgraded)[1] == written(fresh)[1]
    assert "nothing to do" in install(ours, upgraded)
    install(ours, upgraded, "--uninstall")
    assert written(upgraded) == shipped


def test_files_of_the_older_version_are_gone(older_installed: Path, tmp_path: Path) -> None:
    """Also those that this one has elsewhere; what the operator changed stays."""
    upgraded, fresh = tmp_path / "upgraded", tmp_path / "fresh"
    shutil.copytree(older_installed, upgraded, symlinks=True)
    ours = [upgraded / "var/lib/one/remotes", front_end(fresh, VERSIONS[0])]
    conf = ours[0] / "etc/semishared.conf"
    conf.write_text(conf.read_text() + "# mine\n")
    install(caches.CHECKOUT, upgraded)
    install(caches.CHECKOUT, fresh)
    assert conf.read_text().endswith("# mine\n")
    found, wanted = (sorted(str(path.relative_to(tree)) for path in tree.rglob("*")) for tree in ours)
    assert found == wanted


def test_older_version_is_a_version_of_its_own(older: Path) -> None:
    """Or this would not be the test of an upgrade."""
    text = (older / "lib/semishared/__init__.py").read_text()
    assert f'VERSION = "{versions.RELEASE}"' in text
