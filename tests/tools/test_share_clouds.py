# SPDX-License-Identifier: Apache-2.0
"""Two OpenNebulas that mean the same root of shares: whose it is it says itself, and the other one is told
so, and removes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.oned import ActionFailed
from semishared.cli import gc
from semishared.config import Config
from semishared.model.share.share import Tree
from semishared.model.share.steps import LookAtRoot
from semishared.opennebula.oned import Oned
from semishared.plan.care.gc import Finding
from shares.cloud import SHARES, Shares, on, template
from tools.oned_site import ActionSite

MARKER = ".semishared/store"


@pytest.fixture()
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture()
def shares(tmp_path: Path, root: Path) -> Iterator[Shares]:
    (tmp_path / "ours").mkdir()
    with ActionSite.up(tmp_path / "ours") as site:
        yield Shares(site, "plain", root, SEMISHARED_FS_QUOTA="no")


@pytest.fixture()
def theirs(tmp_path: Path, root: Path) -> Iterator[ActionSite]:
    """Another cloud, whose datastore has the same root."""
    (tmp_path / "theirs").mkdir()
    with ActionSite.up(tmp_path / "theirs") as site:
        site.oned.datastore_create(template("plain", root, SEMISHARED_FS_QUOTA="no"), SHARES)
        yield site


def says(root: Path) -> dict[str, str]:
    said: dict[str, str] = json.loads((root / MARKER).read_text())
    return said


def forget(root: Path) -> str:
    """Make a root one of before, which does not say whose it is; return its id."""
    said = says(root)
    (root / MARKER).write_text(json.dumps({"version": 1, "id": said["id"]}))
    return said["id"]


def of_shares(site: ActionSite, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Finding], list[str]]:
    """Return what `semishared gc` finds of shares, and what keeps it from finding some."""
    assert site.oned.rpc
    # There is no libvirt to be asked on this machine.
    site.oned.hosts.clear()
    monkeypatch.setenv("ONE_XMLRPC", site.oned.rpc.url)
    monkeypatch.setenv("ONE_AUTH", str(site.auth))
    survey = gc.survey_cloud(Oned(), Config())
    return gc.elsewhere(survey, Config()), [row["error"] for row in survey.errors]


def test_a_root_of_another_cloud_is_refused_and_gc_does_not_look_at_what_is_in_it(
    shares: Shares, theirs: ActionSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = shares.image("mine", "new:16M")
    cloud = str(shares.oned.datastores[SHARES].template["SEMISHARED_CLOUD"])
    assert says(shares.root)["cloud"] == cloud
    before = says(shares.root)
    assert f"of cloud {cloud}" in theirs.cli("share", "init", str(SHARES), code=2).stderr
    assert "SEMISHARED_STORE" not in theirs.oned.datastores[SHARES].template
    # As a version of before has let it take the other's root for its own.
    theirs.oned.datastore_update(SHARES, {"SEMISHARED_STORE": before["id"]})
    for words in (("init", str(SHARES)), ("list",), ("drop", str(SHARES), str(image))):
        assert "SS085" in theirs.cli("share", *words, code=2).stderr
    found, errors = of_shares(theirs, monkeypatch)
    assert not found and len(errors) == 1 and "another OpenNebula's" in errors[0]
    with pytest.raises(ActionFailed, match="another OpenNebula's"):
        theirs.oned.image_create(SHARES, "x", path="new:16M", type="FILESYSTEM")
    assert says(shares.root) == before and shares.tree(image).is_dir()
    shares.site.cli("share", "init", str(SHARES))
    assert says(shares.root) == before and shares.listed()[image]["state"] == ""


def test_a_root_of_before_goes_on_and_init_has_it_say_whose_it_is(
    shares: Shares, theirs: ActionSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, template_ = shares.image("mine", "new:16M"), shares.oned.datastores[SHARES].template
    marker, cloud = forget(shares.root), template_.pop("SEMISHARED_CLOUD")
    # Who comes later takes it neither over nor in; who has it goes on with what it has, and removes nothing
    # that oned does not know.
    assert "SEMISHARED_STORE" in theirs.cli(
        "share", "init", str(SHARES), code=2
    ).stderr and "cloud" not in says(shares.root)
    other = shares.image("other", "new:16M")
    shares.oned.image_delete(other)
    (shares.root / ".semishared/.shares/77.json").write_text(
        json.dumps({"version": 1, "share": {"image": 77, "owner": 0, "born": 1, "size": 1}, "source": ""})
    )
    ((left,), _) = of_shares(shares.site, monkeypatch)
    assert "does not say of which OpenNebula it is" in left.keep
    assert "does not say" in shares.site.cli("share", "drop", str(SHARES), "77", code=2).stderr
    assert on(LookAtRoot(Tree("plain", str(shares.root), marker)))[0]["cloud"] == ""
    shares.site.cli("share", "init", str(SHARES))
    assert template_["SEMISHARED_CLOUD"] != cloud
    assert says(shares.root) == {"version": 1, "id": marker, "cloud": template_["SEMISHARED_CLOUD"]}
    ((left,), _) = of_shares(shares.site, monkeypatch)
    assert not left.keep and left.path.endswith("/share-77") and shares.listed()[image]["state"] == ""


def test_a_datastore_that_is_made_anew_finds_its_root_again(shares: Shares) -> None:
    marker = says(shares.root)
    shares.oned.datastore_delete(SHARES)
    shares.oned.datastore_create(
        template("plain", shares.root, SEMISHARED_FS_QUOTA="no", SEMISHARED_CLOUD=marker["cloud"]), SHARES
    )
    shares.site.cli("share", "init", str(SHARES))
    assert (
        says(shares.root) == marker
        and shares.oned.datastores[SHARES].template["SEMISHARED_STORE"] == marker["id"]
    )


def test_a_root_that_was_copied_elsewhere_is_not_that_of_its_images(
    shares: Shares, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What their guests write goes to where SOURCE says, which OpenNebula never changes: the copy is to be
    taken for nobody's.
    """
    image = shares.image("mine", "new:16M")
    (shares.tree(image) / "theirs").write_text("live")
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", str(shares.root), str(copy)], check=True)
    shares.oned.datastore_update(SHARES, {"SEMISHARED_FS_ROOT": str(copy)})
    wrong = shares.listed()[image]["wrong"]
    assert f"is of {shares.root}/share-{image}: a root of shares keeps its path" in wrong["detail"]
    found, _ = of_shares(shares.site, monkeypatch)
    assert not [finding for finding in found if not finding.keep], (
        "a copy is no left-over of an image that there is"
    )
    with pytest.raises(ActionFailed, match="a root of shares keeps its path"):
        shares.oned.image_delete(image)
    assert (
        (copy / f"share-{image}" / "theirs").read_text()
        == (shares.root / f"share-{image}" / "theirs").read_text()
        == "live"
    )


@pytest.mark.fault(42, "`share drop` says what would go, and removes nothing, with --dry-run")
def test_what_would_be_dropped_is_said_and_stays(shares: Shares) -> None:
    image = shares.image("mine", "new:16M")
    tree = shares.tree(image)
    (tree / "precious").write_text("x")
    del shares.oned.images[image]
    words = ("share", "drop", str(SHARES), str(image))
    assert (
        f"the share of image {image} in {shares.root}, with all in it"
        in shares.site.cli(*words, "--dry-run").stdout
    )
    assert (tree / "precious").exists()
    assert "for drop and snapshot remove" in shares.site.cli("share", "list", "--yes", code=2).stderr
    assert "is gone" in shares.site.cli(*words, "--yes").stdout and not tree.exists()


@pytest.mark.fault(60, "a new share is made by the PATH that OpenNebula's command makes of new:SIZE")
def test_a_new_share_is_asked_for_as_the_command_writes_it(shares: Shares, tmp_path: Path) -> None:
    """`oneimage create --path new:16M` puts the user's directory, which need not be here, before it."""
    for number, directory in enumerate(("/home/it's me", "/root", "/var/tmp", str(shares.root), "")):
        image = shares.image(f"typed-{number}", f"{directory}/new:16M")
        assert shares.listed()[image]["size"] == 16 << 20
    with pytest.raises(ActionFailed, match="asks for '16'") as caught:
        shares.image("bad", "/home/me/new:16")
    assert "SS002" in str(caught.value)


def test_a_directory_of_that_very_name_is_not_meant(shares: Shares, tmp_path: Path) -> None:
    """It could not be registered: there is no colon in SOURCE of an image."""
    safe = tmp_path / "safe"
    for name in ("new:16M", "a:b"):
        (safe / name).mkdir(parents=True)
        (safe / name / "theirs").touch()
    shares.oned.datastores[SHARES].template["SAFE_DIRS"] = str(safe)
    with pytest.raises(ActionFailed, match="a name that OpenNebula cannot keep as SOURCE"):
        shares.image("colon", f"{safe}/a:b")
    image = shares.image("new", f"{safe}/new:16M")
    assert shares.listed()[image]["size"] == 16 << 20 and os.listdir(shares.tree(image)) == []
    shares.oned.image_delete(image)
    assert os.listdir(safe / "new:16M") == ["theirs"]
