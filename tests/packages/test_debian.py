# SPDX-License-Identifier: Apache-2.0
"""Debian's packages in clean roots: installed, upgraded, removed, purged."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Iterator, List

import pytest

from packages.packaged import ETC, INSTALLER, REMOTES, ROOT, Root, built, repacked
from semishared import VERSION
from semishared.install import preflight
from semishared.model.platforms import DEBIAN_12

RELEASES = [pytest.param(12, id="Debian 12"), pytest.param(13, id="Debian 13")]
OLDER = "0.1.9"
CONF = f"{REMOTES}/etc/semishared.conf"
ESSENTIAL = {"tar", "util-linux"}


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Root]:
    # An overlay's upper directory must not be on an overlay, as /tmp may be.
    with tempfile.TemporaryDirectory(prefix="semishared-root-", dir=tmp_path) as folder:
        yield Root(request.param, Path(folder))


def install(root: Root, packages: List[Path]) -> str:
    """Install packages as an administrator does who has their files."""
    for package in packages:
        shutil.copy(package, root.changed)
    said = root.run("dpkg", "--install", *(f"/{package.name}" for package in packages))
    for package in packages:
        (root.changed / package.name).unlink()
    return said


def version_of(root: Root) -> str:
    return root.run("semishared", "--version").strip()


@pytest.mark.fault(
    79, "a package changes nothing of OpenNebula, says what to run, and leaves nothing when purged"
)
@pytest.mark.parametrize("root", RELEASES, indirect=True)
def test_installed_and_purged(root: Root) -> None:
    before, others = root.opennebula(), root.ours()
    said = install(root, built("deb"))
    assert root.opennebula() == before
    assert f"{INSTALLER} --diff" in said and "does not have the drivers yet" in said
    commit = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", str(ROOT), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
    ).stdout[:10]
    assert version_of(root) == f"semishared {VERSION} ({commit})"
    assert INSTALLER in root.run("semishared", "doctor", code=2)
    assert "semishared-ram enable SIZE" in root.run("semishared-ram", code=1)
    # What the installer says and does is what it says and does in a checkout.
    root.run(INSTALLER)
    assert "TM_MAD_CONF" in (root.changed / ETC / "oned.conf").read_text()
    assert version_of(root) == f"semishared {VERSION} ({commit})"
    assert (root.changed / REMOTES / "lib/semishared/COMMIT").read_text().strip() == commit
    assert "nothing to do" in root.run(INSTALLER)
    root.run(INSTALLER, "--uninstall", "--force")
    root.run("dpkg", "--purge", "semishared", "semishared-node")
    assert (
        root.opennebula().keys() - {name for name in root.opennebula() if "semishared-2" in name}
        == before.keys()
    )
    assert [name for name in root.ours() if "semishared-2" not in name] == others


@pytest.mark.fault(
    79, "an upgraded package changes no driver of a VM until install.sh is run, and its semishared.conf then"
)
@pytest.mark.parametrize("root", RELEASES, indirect=True)
def test_upgraded(root: Root, tmp_path: Path) -> None:
    new = built("deb")
    install(root, [repacked(package, tmp_path, OLDER) for package in new])
    root.run(INSTALLER)
    conf = (root.changed / CONF).read_text()
    assert conf.endswith("# of an older version\n") and OLDER in version_of(root)
    before = root.opennebula()
    said = install(root, new)
    assert root.opennebula() == before, "VMs go on with the drivers that they have"
    assert "goes on with the drivers that it has" in said and OLDER in version_of(root)
    assert not (root.changed / "usr/share/semishared/tm/of_old").is_file()
    said = root.run(INSTALLER)
    assert f"replace /{CONF}" in said and "it was changed" not in said
    assert (root.changed / CONF).read_bytes() == (ROOT / "etc/semishared.conf").read_bytes()
    assert VERSION in version_of(root)
    remotes = root.changed / REMOTES
    assert not (remotes / "tm/semishared/of_old").exists() and (remotes / "tm/semishared/resize").exists()


@pytest.mark.fault(79, "removing a package takes no driver away that VMs may need")
@pytest.mark.parametrize("root", RELEASES[:1], indirect=True)
def test_removed_under_drivers_in_use_and_an_older_one_over_a_newer(root: Root, tmp_path: Path) -> None:
    new = built("deb")
    install(root, new)
    root.run(INSTALLER)
    before = root.opennebula()
    said = root.run("dpkg", "--remove", "semishared")
    assert root.opennebula() == before and "the drivers stay in OpenNebula" in said
    # The operator's command goes with the package; that of the drivers stays.
    assert VERSION in root.run(f"/{REMOTES}/lib/semishared/semishared", "--version")
    root.run("dpkg", "--purge", "semishared")
    assert root.opennebula() == before
    install(root, [repacked(new[0], tmp_path, OLDER)])
    assert root.opennebula() == before
    # Which VMs there are is not known here: the installer refuses.
    assert "--force" in root.run(INSTALLER, code=1)


@pytest.mark.parametrize("root", RELEASES[:1], indirect=True)
def test_settings_of_memory_stay_until_purged(root: Root) -> None:
    install(root, built("deb"))
    settings = root.changed / "etc/semishared-ram.conf"
    settings.write_text("SIZE=1G\nUUID=12345678-1234-1234-1234-123456789012\n")
    cron = root.changed / "etc/cron.d/semishared-ram"
    cron.parent.mkdir(exist_ok=True)
    cron.write_text("@reboot root /usr/sbin/semishared-ram start\n")
    root.run("dpkg", "--remove", "semishared-node")
    assert settings.is_file() and not cron.is_file()
    root.run("dpkg", "--purge", "semishared-node")
    assert not settings.is_file()


def test_packages_depend_on_all_that_machines_need() -> None:
    """By the table that install.sh and doctor go by."""
    for package, role in zip(built("deb"), ("front-end", "host")):
        fields = subprocess.run(
            ["dpkg-deb", "-f", str(package)], capture_output=True, text=True, check=True
        ).stdout
        fields = re.sub(r"\n ", " ", fields)
        named = {
            name: set(re.findall(r"[a-z][a-z0-9.+-]+", text))
            for name, text in re.findall(r"(?m)^(\w+): (.*)$", fields)
        }
        needs = {name for word in preflight.NEEDS[role] for name in DEBIAN_12.packages[word].split()}
        wants = {name for word in preflight.WANTS[role] for name in DEBIAN_12.packages[word].split()}
        assert needs - ESSENTIAL <= named["Depends"], (role, named)
        assert wants <= named["Depends"] | named["Recommends"] | named["Suggests"], (role, named)


def test_lintian_has_nothing_to_say() -> None:
    packages = [str(package) for package in built("deb")]
    done = subprocess.run(["lintian", "--allow-root", *packages], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
