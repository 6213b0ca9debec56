# SPDX-License-Identifier: Apache-2.0
"""`semishared setup --apply` against a simulated oned: made once, found again, never over somebody else's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Iterator

import pytest

import schemas
from lab.oned import Oned, Settings

UUID = "0b6a6b9e-0000-4000-8000-000000000001"
COMMAND = Path(__file__).resolve().parents[2] / "bin" / "semishared"


class Site:
    """A simulated oned and a session with it."""

    def __init__(self, oned: Oned, auth: Path) -> None:
        self.oned, self.auth = oned, auth

    def setup(self, *options: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        assert self.oned.rpc
        env = {"PATH": os.environ["PATH"], "ONE_XMLRPC": self.oned.rpc.url, "ONE_AUTH": str(self.auth), **env}
        done = subprocess.run([str(COMMAND), "setup", *options], env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        schemas.check(done.args, done.stdout.encode())
        return done


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    auth = tmp_path / "one_auth"
    auth.write_text("oneadmin:password\n")
    # What oned calls as soon as it has an image datastore.
    monitor = tmp_path / "fe/var/lib/one/remotes/datastore/semishared/monitor"
    monitor.parent.mkdir(parents=True)
    monitor.write_text("#!/bin/sh\necho USED_MB=1 TOTAL_MB=3 FREE_MB=2\n")
    monitor.chmod(0o755)
    with Oned.in_tree(tmp_path, Settings()) as oned:
        yield Site(oned, auth)


def test_makes_both_and_finds_them_again(site: Site) -> None:
    said = site.setup("--apply", "--set", "SEMISHARED_PLACE=shared", "--set", "SAFE_DIRS=/srv/a /b").stdout
    image, system = site.oned.datastores[100], site.oned.datastores[101]
    assert (image.name, image.type, image.ds_mad, image.tm_mad) == ("semi_img", 0, "semishared", "semishared")
    assert image.template["SEMISHARED_PLACE"] == "shared" and image.template["SAFE_DIRS"] == "/srv/a /b"
    assert (system.name, system.type, system.tm_mad) == ("semi_sys", 1, "semishared")
    assert "semi_img: id 100" in said and "/var/lib/one/datastores/100" in said
    again = json.loads(site.setup("--apply", "--json", "--set", "SEMISHARED_PLACE=shared").stdout)
    assert [row["ID"] for row in again["datastores"]] == [100, 101] and len(site.oned.datastores) == 2


def test_nothing_is_made_over_what_is_there(site: Site) -> None:
    site.oned.datastore_create('NAME="semi_sys" TYPE="SYSTEM_DS" TM_MAD="ssh"', 7)
    assert "semi_sys (id 7) of another kind" in site.setup("--apply", code=1).stderr
    site.setup("--apply", "--system", "other")
    assert (
        "with another SEMISHARED_PLACE"
        in site.setup("--apply", "--system", "other", "--set", "SEMISHARED_PLACE=shared", code=1).stderr
    )
    assert len(site.oned.datastores) == 3


def test_what_is_there_under_another_name_is_found_and_no_second_pair_is_made(site: Site) -> None:
    """An upgrade says `setup --apply` and nothing else."""
    site.oned.datastore_create(
        'NAME="shares" TYPE="IMAGE_DS" DS_MAD="semishared" TM_MAD="semishared" DISK_TYPE="FILESYSTEM"', 119
    )
    site.setup("--apply", "--image", "nvme_images", "--system", "nvme_system")
    assert [row["ID"] for row in json.loads(site.setup("--apply", "--json").stdout)["datastores"]] == [
        120,
        121,
    ]
    assert len(site.oned.datastores) == 3
    # Another kind is another datastore; then there are two, and none is meant.
    ceph = ["--set", "CEPH_USER=libvirt", "--set", f"CEPH_SECRET={UUID}", "--set", "BRIDGE_LIST=h1"]
    site.setup("--apply", "--kind", "rbd", "--image", "fast", *ceph)
    said = site.setup("--apply", code=1).stderr
    assert (
        "several image datastores of semishared, fast, nvme_images: say which by --image NAME" in said
        and said.count("\n") == 1
    )
    assert "keys and libvirt secrets" in site.setup("--apply", "--image", "fast").stdout
    assert [
        row["ID"] for row in json.loads(site.setup("--apply", "--json", "--kind", "dir").stdout)["datastores"]
    ] == [120, 121]
    site.setup("--apply", "--image", "nvme_images", "--system", "other")
    assert "say which by --system NAME" in site.setup("--apply", "--image", "fast", code=1).stderr
    assert len(site.oned.datastores) == 5
    # The usual name is the one that is meant.
    site.setup("--apply", "--image", "semi_img", "--system", "semi_sys")
    site.setup("--apply")


def test_wrong_attributes_never_reach_oned(site: Site) -> None:
    assert (
        "is SEMISHARED_LOCAL meant?"
        in site.setup("--apply", "--set", "SEMISHARED_LOCALS=copy", code=1).stderr
    )
    assert site.oned.rpc and not site.oned.rpc.requests


def test_files(site: Site, tmp_path: Path) -> None:
    said = site.setup("--out", str(tmp_path / "out")).stdout
    assert str(tmp_path / "out/semi_img.ds") in said
    site.oned.datastore_create((tmp_path / "out/semi_img.ds").read_text(), 100)
    assert site.oned.datastores[100].name == "semi_img"


CLOSED = """
import os, sys
sys.path.insert(0, {lib!r})
from semishared.cli import main, command
code = main.main(["setup", "--out", {out!r}])
with command.Waiting("hosts", 1):
    sys.exit(code or any(os.readlink(f"/proc/self/fd/{{fd}}") != wanted for fd, wanted in {there!r}.items()))
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_nothing_is_mistaken_for_a_stream_that_is_closed(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """As of a shell's `>&-`: nobody reads what is said, and all is done."""
    text = CLOSED.format(
        lib=str(COMMAND.parents[1] / "lib"),
        out=str(tmp_path / "out"),
        there=dict.fromkeys(closed, "/dev/null"),
    )
    words = " ".join(f"{fd}>&-" for fd in closed)
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec /usr/bin/python3 -c "$0" {words}', text], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"semi_img.ds", "semi_sys.ds"}
