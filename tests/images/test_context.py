# SPDX-License-Identifier: Apache-2.0
"""Files of a VM's context, as FILES_DS and FILES name them; isoinfo reads the ISO back."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from semishared.errors import MissingImage
from semishared.tools import context_iso

LONG = "cloud-config-of-the-web-tier-in-production-for-the-site-of-munich-a"


def listed(iso: str, tmp_path: Path) -> str:
    # Its name is of this process alone.
    shutil.copyfile(iso, tmp_path / "iso")
    words = ["isoinfo", "-R", "-l", "-i", str(tmp_path / "iso")]
    return subprocess.run(words, capture_output=True, check=True).stdout.decode()


@pytest.mark.fault(51, "files of a context whose names are equal in 64 letters are in it, as stock has them")
def test_long_names(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("one")
    (tmp_path / "2").write_text("two")
    assert len(LONG) > 64
    names = [f"{tmp_path}/{number}:'{LONG}{number}.yaml'" for number in (1, 2)]
    with context_iso.built(tuple(names)) as iso:
        assert f"{LONG}1.yaml" in listed(iso, tmp_path) and f"{LONG}2.yaml" in listed(iso, tmp_path)


@pytest.mark.fault(51, "a dead link in a directory of a context is copied, as stock does")
def test_dead_link_is_copied(tmp_path: Path) -> None:
    (tmp_path / "d/below").mkdir(parents=True)
    os.symlink("nowhere", tmp_path / "d/below/dead")
    os.symlink("file", tmp_path / "d/alive")
    (tmp_path / "d/file").write_text("text")
    with context_iso.built((f"{tmp_path}/d:'d'",)) as iso:
        assert "dead -> nowhere" in listed(iso, tmp_path) and "alive -> file" in listed(iso, tmp_path)


@pytest.mark.parametrize("where", ["d", "d/below", ""])
def test_fifo_is_refused_by_its_name(tmp_path: Path, where: str) -> None:
    (tmp_path / "d/below").mkdir(parents=True)
    os.mkfifo(tmp_path / where / "pipe")
    named = f"{tmp_path}/d" if where else f"{tmp_path}/pipe"
    with pytest.raises(MissingImage, match="pipe is"), context_iso.built((named,)):
        pass
