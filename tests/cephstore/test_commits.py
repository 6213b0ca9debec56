# SPDX-License-Identifier: Apache-2.0
"""Commits to images on Ceph, beyond what every kind of store does (tests/store/diff_cases.py): hosts that are
cut off, locks.
"""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import rbd

from semishared.errors import CommitRefused, ImageInUse, NotSupported
from semishared.store.rbd import claim, commit, image
from store.benches import RbdBench
from store.cases import of, ref
from store.diff_cases import is_content, lent
from tools.ceph_site import Site
from tools.test_commits import points, stopped


@pytest.mark.parametrize("where", ["change noted", "commit written"])
def test_a_host_that_was_cut_off_writes_no_more(
    where: str, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = RbdBench(site)
    at = points(lent(bench, tmp_path, 6), tmp_path / "trace").index(where) + 1
    it = lent(bench, tmp_path)
    old = (it.top / "base").read_bytes()
    with stopped(it, at) as process:
        # While it is in sight, nobody takes the image from it.
        with monkeypatch.context() as soon:
            soon.setattr(image, "WATCH_S", 0)
            with pytest.raises(ImageInUse):
                of(bench).check(it.image)
        is_content(bench, it, old)
        process.send_signal(signal.SIGCONT)
        assert process.wait(120) != 0, "it has lost the image's lock"
    is_content(bench, it, old)
    it.commit()
    is_content(bench, it, it.wanted())


def test_a_host_that_is_fenced_in_the_midst_of_a_commit_writes_no_more(site: Site, tmp_path: Path) -> None:
    bench = RbdBench(site)
    at = points(lent(bench, tmp_path, 6), tmp_path / "trace").index("change noted") + 1
    it = lent(bench, tmp_path)
    old = (it.top / "base").read_bytes()
    with stopped(it, at) as process:
        (client,) = site.busy()[it.image.source.split("/")[1]]
        site.command("osd blocklist", blocklistop="add", addr=client)
        process.send_signal(signal.SIGCONT)
        assert process.wait(120) != 0, "it was kept out"
    is_content(bench, it, old)
    it.commit()
    is_content(bench, it, it.wanted())


@pytest.mark.fault(46, "a claim is given up under the image's lock: who has claimed it meanwhile keeps it")
def test_a_claim_is_not_given_up_while_another_is_made(site: Site, tmp_path: Path) -> None:
    it = lent(RbdBench(site), tmp_path)
    newer = it.owner._replace(epoch=it.owner.epoch + 1)
    with ThreadPoolExecutor(1) as pool:
        with commit._alone(it.image) as opened:
            late = pool.submit(commit.disown, it.image, it.owner)
            time.sleep(1)
            found = claim.read(opened)
            assert found, "given up while somebody else had the image's lock"
            claim.write(opened, found._replace(owner=newer))
        late.result(60)
    assert commit.owner(it.image) == newer


def test_an_image_that_cannot_be_locked_is_not_claimed(site: Site, tmp_path: Path) -> None:
    bench = RbdBench(site)
    it = lent(bench, tmp_path)
    made = ref(bench, 8)
    site.rbd.create(
        site.ioctx, made.source.split("/")[1], 16 << 20, old_format=False, features=rbd.RBD_FEATURE_LAYERING
    )
    with pytest.raises(NotSupported, match="exclusive-lock"):
        of(bench).claim(made, it.owner)


def test_a_commit_leaves_one_snapshot_of_the_content(site: Site, tmp_path: Path) -> None:
    bench = RbdBench(site)
    it = lent(bench, tmp_path)
    name = it.image.source.split("/")[1]
    for byte in range(1, 4):
        it.write(f"write -P {byte} 11M 4k")
        done = it.commit()
        assert site.snapshots(name) == [f"semishared-{done.generation}"]
    is_content(bench, it, it.wanted(), done.generation)


def test_a_commit_that_nobody_settled_is_settled_before_the_next(site: Site, tmp_path: Path) -> None:
    bench = RbdBench(site)
    it = lent(bench, tmp_path)
    of(bench).commit(it.image, it.owner, it.diff)
    it.write("write -P 9 11M 4k")
    with pytest.raises(CommitRefused, match="settled"):
        of(bench).commit(it.image, it.owner, it.diff)
    it.commit()
    is_content(bench, it, it.wanted())


def test_an_image_that_a_guest_has_open_is_neither_claimed_nor_committed_to(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = RbdBench(site)
    it = lent(bench, tmp_path)
    monkeypatch.setattr(image, "WATCH_S", 0)
    with bench.writing(it.image.source):
        for ask in (
            lambda: of(bench).claim(it.image, it.owner),
            lambda: of(bench).commit(it.image, it.owner, it.diff),
        ):
            with pytest.raises(ImageInUse):
                ask()
