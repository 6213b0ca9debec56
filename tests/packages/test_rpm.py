# SPDX-License-Identifier: Apache-2.0
"""RPM's packages: built by Debian's rpmbuild, listed, and installed in a root by `rpm --root`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from packages.packaged import INSTALLER, Root, built
from semishared import VERSION


def asked(*words: str) -> str:
    return subprocess.run(["rpm", *words], capture_output=True, text=True, check=True).stdout


def test_installed_in_a_root_and_erased(tmp_path: Path) -> None:
    front_end, node = map(str, built("rpm"))
    names = asked("-qp", "--qf", "%{NAME} %{VERSION} %{ARCH}\\n", front_end, node).splitlines()
    assert names == [f"semishared {VERSION} noarch", f"semishared-node {VERSION} noarch"]
    listed = asked("-qpl", front_end).splitlines()
    assert INSTALLER in listed and "/usr/bin/semishared" in listed
    assert "/usr/sbin/semishared-ram" in asked("-qpl", node).splitlines()
    needs = asked("-qp", "--requires", node)
    assert {"qemu-img", "libvirt-client", "python3-libvirt"} <= set(needs.split())
    root = Root(13, tmp_path / "root")
    before, others = root.opennebula(), root.ours()

    def rpm(*words: str) -> str:
        # What it depends on are packages of another kind in this root.
        return root.run("sh", "-c", 'exec rpm --root "$NEW" "$@"', "rpm", *words, beside=True)

    said = rpm("--install", "--nodeps", front_end, node)
    assert f"{INSTALLER} --diff" in said and root.opennebula() == before
    assert rpm("--verify", "--nodeps", "semishared", "semishared-node") == ""
    assert VERSION in root.run("semishared", "--version")
    root.run(INSTALLER)
    said = rpm("--erase", "semishared")
    assert "the drivers stay in OpenNebula" in said
    rpm("--install", "--nodeps", front_end)
    root.run(INSTALLER, "--uninstall", "--force")
    rpm("--erase", "--nodeps", "semishared", "semishared-node")
    assert [name for name in root.ours() if "semishared-2" not in name] == others


def test_rpmlint_finds_no_error() -> None:
    done = subprocess.run(
        ["rpmlint", "--config", "packaging/rpm/rpmlint.toml", *map(str, built("rpm"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and " 0 errors, 0 warnings" in done.stdout, done.stdout + done.stderr
