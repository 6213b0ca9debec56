# SPDX-License-Identifier: Apache-2.0
"""What is promised to shares of btrfs, and what becomes of it when the kernel stops counting: on a file
system of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab.oned import ActionFailed
from semishared.model.share import steps as share_steps
from semishared.opennebula.xml import Datastore
from semishared.plan.care.diagnosis import BROKEN, Finding
from semishared.plan.care.diagnosis_shares import Made, of_roots
from shares.cloud import SHARES, MiB, Shares, fill, on
from shares.conftest import mounted_btrfs, run
from tools.oned_site import ActionSite


@pytest.fixture()
def shares(tmp_path: Path) -> Iterator[Shares]:
    with mounted_btrfs(tmp_path) as where, ActionSite.up(tmp_path) as site:
        run("btrfs", "quota", "rescan", "-w", where)
        yield Shares(site, "btrfs", where)


def doctor(shares: Shares) -> list[Finding]:
    """Return what doctor makes of the root."""
    (seen,) = on(share_steps.LookAtRoot(shares.known()))
    store = Datastore(
        ElementTree.fromstring(f"<DATASTORE><ID>{SHARES}</ID><NAME>shares</NAME><TEMPLATE/></DATASTORE>")
    )
    made = Made(store, shares.known(), "h1", lapsed=seen["lapsed"], promised=seen["promised"])
    return of_roots([made], "fe")


def stop_counting(shares: Shares, image: int) -> None:
    """Have the kernel do what it does for the sake of speed when a snapshot goes that has much in common with
    its share.
    """
    (uuid,) = run("findmnt", "-n", "-o", "UUID", shares.root).split()
    threshold = Path(f"/sys/fs/btrfs/{uuid}/qgroups/drop_subtree_threshold")
    if not threshold.exists():
        pytest.skip("the kernel is older than 6.1, and always counts")
    tree = shares.tree(image)
    for number in range(400):
        (tree / str(number)).write_bytes(bytes(300))
    run("sync", "-f", tree)
    shares.site.cli("share", "snapshot", "create", str(image), "before")
    threshold.write_text("0")
    for number in range(200):
        (tree / str(number)).write_bytes(b"x")
    run("sync", "-f", tree)
    shares.site.cli("share", "snapshot", "remove", str(image), "before")
    run("btrfs", "subvolume", "sync", shares.root)
    run("sync", "-f", tree)


def test_while_the_kernel_does_not_count_nothing_is_promised_and_everybody_is_told(shares: Shares) -> None:
    small, large = shares.image("small", "new:8M"), shares.image("large", "new:64M")
    cli = shares.site.cli
    assert doctor(shares) == []
    stop_counting(shares, large)
    assert fill(shares.tree(small) / "file", 16) == (16 * MiB, "")  # what nobody was told of
    mend = f"btrfs quota rescan -w {shares.root}"
    with pytest.raises(ActionFailed, match=rf"SS170 .*no share is held to its size .*{mend}"):
        shares.image("more", "new:8M")
    for size in ("4M", "48M"):
        assert "SS170" in cli("share", "resize", str(small), size, code=2).stderr
    rows = shares.listed()
    assert set(rows) == {small, large}
    for row in rows.values():
        assert row["used"] == -1 and mend in row["state"] and "SS170" in row["state"]
    assert "SS170" in cli("share", "usage", str(small), code=2).stderr
    ((found,),) = [doctor(shares)]
    assert (found.severity, found.mend) == (BROKEN, f"as root on h1: {mend}")
    shares.oned.image_delete(large)
    assert not (shares.root / f"share-{large}").exists() and set(shares.listed()) == {small}

    run(*mend.split())
    assert doctor(shares) == [] and shares.listed()[small]["used"] > 16 * MiB
    with pytest.raises(OSError, match="Disk quota exceeded"):
        (shares.tree(small) / "more").write_text("x")
    for image in (shares.image("more", "new:8M"), small):
        shares.oned.image_delete(image)


def test_what_is_promised_is_not_free_and_doctor_tells_of_promises_beyond_it(shares: Shares) -> None:
    first, second = shares.image("first", "new:128M"), shares.image("second", "new:256M")
    found = shares.oned.datastore(SHARES)
    assert found.free_mb == 512 - 128 - 256
    assert doctor(shares) == []
    shares.site.cli("share", "resize", str(second), "500M")
    ((warning,),) = [doctor(shares)]
    assert "its shares may hold 628.0 MiB" in warning.what and "512.0 MiB" in warning.what
    record = shares.root / f".semishared/.shares/{first}.json"
    text = record.read_text()
    record.write_text("{}")
    assert on(share_steps.MeasureRoot(shares.known()))[0][2] == 12 * MiB
    record.write_text(text)
    assert json.loads(text)["share"]["size"] == 128 * MiB
    for image in (first, second):
        shares.oned.image_delete(image)
    assert on(share_steps.MeasureRoot(shares.known()))[0][2] > 400 * MiB
