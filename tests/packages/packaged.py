# SPDX-License-Identifier: Apache-2.0
"""Packages of this checkout's commit, and roots of Debian releases in which they are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Dict, List

from configurations import oned_conf, vmm_execrc

ROOT = Path(__file__).resolve().parents[2]
STOCK = ROOT / "tests/lab/stock"
REMOTES, ETC = "var/lib/one/remotes", "etc/one"
INSTALLER = "/usr/share/semishared/install.sh"
NOT_OURS = re.compile(r"var/(lib/dpkg|cache|log|lib/rpm)/|packages/")
"""What packages' own tools keep of every package that there ever was."""


@cache
def built(how: str) -> List[Path]:
    """Build the packages, by `deb` or `rpm`, and return them: of the front-end, then of hosts."""
    done = subprocess.run([f"packaging/{how}.sh"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [ROOT / line for line in sorted(done.stdout.split(), key=lambda name: "-node" in name)]


class Root:
    """A root with an OpenNebula in it, as its packages lay that out."""

    def __init__(self, release: int, upper: Path) -> None:
        self.release, self.upper = release, upper
        self.changed = upper / "changed"
        shutil.copytree(STOCK, self.changed / REMOTES)
        (self.changed / ETC / "vmm_exec").mkdir(parents=True)
        (self.changed / ETC / "oned.conf").write_text(oned_conf())
        (self.changed / ETC / "vmm_exec/vmm_execrc").write_text(vmm_execrc())
        # dpkg would have all manual pages of the release read for each package.
        self.run("rm", "-f", "/var/lib/man-db/auto-update")

    def run(self, *words: str, code: int = 0, beside: bool = False) -> str:
        """Run a command in it, or `beside` it; return what it printed."""
        where = [*(["--beside"] if beside else []), str(self.release), str(self.upper)]
        done = subprocess.run(
            [str(ROOT / "tests/packages/root.sh"), *where, *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, said
        return said

    def opennebula(self) -> Dict[str, bytes]:
        """Return all of OpenNebula's files, with ours among them."""
        found = {}
        for top in (REMOTES, ETC):
            for path in sorted((self.changed / top).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    found[str(path.relative_to(self.changed))] = path.read_bytes()
        return found

    def ours(self) -> List[str]:
        """Return the paths of all files that have our name, but for what this checkout itself is."""
        found = []
        for path in sorted(self.changed.rglob("*semishared*")):
            name = str(path.relative_to(self.changed))
            # What was there and is not is a character device 0:0 in an overlay.
            if not NOT_OURS.match(name) and not path.is_char_device():
                found.append(name)
        return found


def repacked(package: Path, folder: Path, version: str) -> Path:
    """Return a package of Debian with another version, in which one file more is, and one less."""
    tree = folder / "tree"
    subprocess.run(["dpkg-deb", "-R", str(package), str(tree)], check=True)
    control = tree / "DEBIAN/control"
    control.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", control.read_text()))
    share = tree / "usr/share/semishared"
    if share.is_dir():
        init, conf = share / "lib/semishared/__init__.py", share / "etc/semishared.conf"
        init.write_text(re.sub(r'(?m)^VERSION = ".*"$', f'VERSION = "{version}"', init.read_text()))
        conf.write_text(conf.read_text() + "# of an older version\n")
        (share / "tm/of_old").write_text("#!/bin/sh\n")
        (share / "tm/resize").unlink()
    target = folder / f"{package.name.split('_')[0]}_{version}_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "-b", str(tree), str(target)], check=True)
    shutil.rmtree(tree)
    return target


PAGE = ROOT / "docs/how-to/install-packages.md"


def on_page(part: str) -> List[str]:
    """Return the commands of a part of the page, which is marked for the test."""
    found = re.search(rf"<!-- root: {part} -->\n\n((?:    .*\n)+)", PAGE.read_text())
    assert found, part
    return [line.strip() for line in found[1].splitlines()]
