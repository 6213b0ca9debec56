# SPDX-License-Identifier: Apache-2.0
"""A datastore after Update in Sunstone: its actions are right or refused, and `doctor --fix` mends it."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import pytest

from lab.oned import ActionFailed
from neighbours import sunstone
from semishared.cli import doctor_fix, gc, main
from semishared.errors import LostAttributes
from semishared.front import noted_datastores
from semishared.model.store import lost, template
from semishared.opennebula.xml import Datastore
from tools.oned_site import STORE, SYSTEM, ActionSite

VERSIONS = sorted(sunstone.VERSIONS)
FINISHED = [name for name, case in sunstone.CASES.items() if case["lost"]["7.4.0"] is not None]
LINE = "has lost SEMISHARED_STORE, as by Update in Sunstone; `semishared doctor --fix`"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActionSite]:
    with ActionSite.up(tmp_path) as up:
        monkeypatch.setenv("ONE_AUTH", str(up.auth))
        assert up.oned.rpc
        monkeypatch.setenv("ONE_XMLRPC", up.oned.rpc.url)
        yield up


def said(site: ActionSite, number: int = STORE) -> Dict[str, Any]:
    return site.oned.datastores[number].template


def updated(site: ActionSite, version: str, number: int = STORE) -> None:
    """Click Update and Finish."""
    sent = sunstone.update(version, {**said(site, number), "NAME": site.oned.datastores[number].name})
    assert sent is not None
    site.oned.datastore_replace(number, sent)  # type: ignore[arg-type]


def marked(site: ActionSite) -> str:
    """Mark the store as setup does, have its monitoring note it, and return the id."""
    site.cli("setup", "--apply", "--is-store")
    site.oned.datastore_monitor(STORE)
    return str(said(site)["SEMISHARED_STORE"])


def fixed(**more: Any) -> bool:
    """Run `doctor --fix` up to where doctor begins to look, which it does not as root."""
    return doctor_fix.put_back(argparse.Namespace(yes=True, dry_run=False, json=False, **more))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", sunstone.CASES)
def test_what_the_form_takes_away(version: str, name: str) -> None:
    case = sunstone.CASES[name]
    wanted: Optional[List[str]] = case["lost"][version]
    sent = sunstone.update(version, case["template"])
    assert (sent is None) == (wanted is None)
    if sent is not None:
        assert sorted({*case["template"]} - {*sent}) == wanted
        assert {name: value for name, value in sent.items() if name in case["template"]}.items() <= case[
            "template"
        ].items()
        assert {*sent} - {*case["template"]} <= {"DS_MAD", "TM_MAD"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FINISHED)
def test_what_was_lost_is_known_from_the_note(
    version: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each kind: which it is stays known, and all that the form took is found and named."""
    monkeypatch.setenv("ONE_AUTH", str(tmp_path / "one_auth"))
    case = sunstone.CASES[name]
    number = {"RBD": 3, "FILESYSTEM": 10}.get(case["template"]["DISK_TYPE"], 0)
    kind = int(case["template"]["TYPE"] == "SYSTEM_DS")

    def datastore(words: Dict[str, str]) -> Datastore:
        inner = "".join(f"<{key}>{value}</{key}>" for key, value in words.items())
        head = (
            f"<ID>100</ID><TYPE>{kind}</TYPE><DISK_TYPE>{number}</DISK_TYPE><BASE_PATH>{tmp_path}</BASE_PATH>"
        )
        return Datastore.parse(f"<DATASTORE>{head}<TEMPLATE>{inner}</TEMPLATE></DATASTORE>")

    before = datastore(case["template"])
    noted_datastores.note(before)
    after = datastore(sunstone.update(version, case["template"]) or {})
    assert template.disk_type(after) == template.disk_type(before) or number == 0
    found = noted_datastores.lost(after)
    assert found == {key: case["template"][key] for key in case["lost"][version]}
    refused = sorted({*found} & {*lost.WHICH})
    if refused:
        with pytest.raises(LostAttributes, match=", ".join(refused)):
            noted_datastores.whole(after)
    else:
        assert noted_datastores.whole(after) is after


@pytest.mark.fault(54, "after Update in Sunstone 7.4 a mounted store works on as it was")
def test_a_dir_store_after_7_4(site: ActionSite) -> None:
    store, image = marked(site), site.image()
    updated(site, "7.4.0")
    assert "DISK_TYPE" not in said(site) and said(site)["SEMISHARED_STORE"] == store
    site.make("clone", site.vm(image))
    another = site.image("another")
    assert site.source(another).parent == site.store
    assert fixed() and said(site)["DISK_TYPE"] == "FILE"


@pytest.mark.fault(54, "a mounted store that lost its id after Update in Sunstone 7.2 is refused by one line")
def test_a_dir_store_after_7_2(site: ActionSite) -> None:
    store, image = marked(site), site.image()
    vm, unused = site.vm(image), site.image("unused")
    before = {**said(site)}
    updated(site, "7.2.0")
    for work in (
        lambda: site.make("clone", vm),
        lambda: site.image("b"),
        lambda: site.oned.image_delete(unused),
    ):
        line = site.refused("SS089", work)
        assert "has lost SEMISHARED_CLOUD, SEMISHARED_STORE, as by Update in Sunstone" in line
        assert "`semishared doctor --fix`" in line
    # An empty mount point in its place is no store either.
    site.store.rename(site.top / "away")
    site.store.mkdir()
    assert "SS089" in site.refused("SS089", site.image, "c") and os.listdir(site.store) == []
    site.store.rmdir()
    (site.top / "away").rename(site.store)
    site.refused("SS089", site.oned.datastore_monitor, STORE)
    assert fixed()
    assert {name: said(site).get(name) for name in before if name != "NAME"} == before
    assert said(site)["SEMISHARED_STORE"] == store
    site.make("clone", vm)


@pytest.mark.fault(54, "without a note the marker of a store says that its datastore has lost the id")
def test_a_dir_store_without_a_note(site: ActionSite) -> None:
    store, image = marked(site), site.image()
    Path(noted_datastores.path_of(Datastore.parse(site.oned.datastores[STORE].to_xml()))).unlink()
    updated(site, "7.2.0")
    assert LINE in site.refused("SS089", site.image, "b")
    # A store without the images that oned knows is another one.
    hidden = site.source(image).rename(site.top / "hidden")
    assert not fixed() and "SEMISHARED_STORE" not in said(site)
    hidden.rename(site.source(image))
    site.oned.datastore_replace(
        STORE, {key: value for key, value in said(site).items() if key != "DISK_TYPE"}
    )
    assert fixed() and said(site)["SEMISHARED_STORE"] == store
    site.image("c")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.fault(54, "a datastore on Ceph that lost DISK_TYPE is never taken for a mounted tree")
def test_an_rbd_store_is_never_a_mounted_one(site: ActionSite, version: str) -> None:
    words = sunstone.CASES["rbd"]["template"]
    text = " ".join(f'{name}="{value}"' for name, value in words.items() if name != "BRIDGE_LIST")
    try:
        site.oned.datastore_create(f'{text} DS_MAD="semishared" TM_MAD="semishared"', 110)
    except ActionFailed:
        pass  # there is no Ceph; it was noted before that is found out
    (site.location / "110").mkdir(exist_ok=True)
    updated(site, version, 110)
    source = site.top / "upload.img"
    source.write_bytes(b"x" * (1 << 20))
    said(site, 110)["SAFE_DIRS"] = str(site.top)
    with pytest.raises(ActionFailed) as caught:
        site.oned.image_create(110, "a", path=str(source))
    # At most what is unpacked on the front-end on its way.
    assert os.listdir(site.location / "110") in ([], [".semishared"])
    assert ("SS089" in str(caught.value)) == (version == "7.2.0"), caught.value
    assert fixed()
    gone = [name for name in words if name not in (*said(site, 110), "NAME", "BRIDGE_LIST")]
    assert gone == [] and said(site, 110)["DISK_TYPE"] == "RBD"


def test_fix_shows_and_does_nothing_with_dry_run(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    marked(site)
    updated(site, "7.2.0")
    before = {**said(site)}
    arguments = argparse.Namespace(yes=False, dry_run=True, json=False)
    assert not doctor_fix.put_back(arguments) and said(site) == before
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].split(" = ")[0] for line in lines] == [
        "DISK_TYPE",
        "SEMISHARED_CLOUD",
        "SEMISHARED_STORE",
    ]
    assert all(line.endswith("would be put back") for line in lines)


@pytest.mark.parametrize("words", [["publish"], ["detach", "--due"]], ids=["publish", "detach"])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.fault(54, "what a system datastore has been given since its setup is put back after Update too")
def test_a_system_datastore_given_more_since(
    site: ActionSite, monkeypatch: pytest.MonkeyPatch, version: str, words: list[str]
) -> None:
    """Nothing monitors one of ours: what the timer starts notes it. Its publisher asks oned for nothing as
    long as no VM has changed, while its detaching asks for all datastores each time.
    """
    marked(site)
    site.oned.datastore_update(SYSTEM, 'SEMISHARED_IO_CLASS="normal"')
    before = {**said(site, SYSTEM)}
    with monkeypatch.context() as oneadmin:
        oneadmin.setattr(os, "geteuid", lambda: 9869)
        assert main.main(words) == 0
    updated(site, version, SYSTEM)
    assert fixed()
    assert {name: said(site, SYSTEM).get(name) for name in before if name != "NAME"} == before


def test_a_note_that_is_damaged_is_said(site: ActionSite) -> None:
    marked(site)
    path = Path(noted_datastores.path_of(Datastore.parse(site.oned.datastores[STORE].to_xml())))
    assert json.loads(path.read_text())["attributes"]["SEMISHARED_STORE"] == said(site)["SEMISHARED_STORE"]
    path.write_text("{")
    site.image("whole")
    updated(site, "7.2.0")
    path.write_text("{")
    assert "semishared_datastores/100" in site.refused("SS042", site.image, "b")


def test_gc_looks_into_no_store_that_may_be_another(site: ActionSite) -> None:
    marked(site)
    stores = [Datastore.parse(one.to_xml()) for one in site.oned.datastores.values()]
    assert gc.whole(stores) == stores
    updated(site, "7.2.0")
    survey = gc.Survey()
    stores = [Datastore.parse(one.to_xml()) for one in site.oned.datastores.values()]
    assert [store.id for store in gc.whole(stores, survey)] == [SYSTEM]
    (error,) = survey.errors
    assert "has lost SEMISHARED_CLOUD, SEMISHARED_STORE" in error["error"]
