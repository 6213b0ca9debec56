# SPDX-License-Identifier: Apache-2.0
"""--dry-run of detach, publish and stage: what they say is what they do then, and saying it changes nothing.

And --json of every verb: one object of its schema, also where there is nothing to do, or another run is at
it. The real command, a simulated oned, the real host side.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import pytest

import schemas
from rehearsing import things
from semishared.cli import main
from semishared.cli.main import COMMANDS, parser
from semishared.front import vm_notes
from semishared.tools import locks
from tools.oned_site import HERE, ActionSite
from tools.test_publish import settled

ERROR = 3
"""State of a host that oned does not see."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActionSite]:
    with ActionSite.operated(tmp_path / "one", monkeypatch, has_host=True) as up:
        os.chown(up.top / "semishared_key", 9869, -1)
        yield up


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Dict[str, Any]:
    """Run the command with --json; return the object that it prints last."""
    capsys.readouterr()
    found = main.main([*words, "--json"])
    said = capsys.readouterr()
    assert found == code, said
    last: Dict[str, Any] = list(schemas.objects(said.out))[-1]
    return last


def state(site: ActionSite) -> Tuple[Any, ...]:
    """Return all that there is on disk, and in oned of VMs and images."""
    vms = {vm.id: json.dumps(vm.user_template) for vm in site.oned.vms.values()}
    return things(site.top), vms, {image.id: image.to_xml() for image in site.oned.images.values()}


def known_to_none(site: ActionSite, image: int) -> None:
    """Have an image written to, so that no machine knows the hashes of its content."""
    with site.source(image).open("r+b") as file:
        file.write(b"more")


def bases(site: ActionSite) -> List[str]:
    folder = site.location / ".semishared/bases"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.mark.fault(83, "stage --dry-run says which bases come from where, and then these come")
def test_stage_says_what_it_does(site: ActionSite, capsys: pytest.CaptureFixture[str]) -> None:
    number = site.image()
    image = str(number)
    known_to_none(site, number)
    before = state(site)
    unread = told(capsys, "stage", image, "--dry-run")
    assert state(site) == before
    (row,) = unread["hosts"].values()
    assert (unread["dry_run"], row["ok"], row["why"]) == (True, False, "")
    assert row["would"] == [f"have the base of image {image}: read it whole from the store"]
    done = told(capsys, "stage", image)
    (name,) = bases(site)
    assert (done["dry_run"], done["complete"], done["hosts"][HERE]["would"]) == (False, True, [])
    before = state(site)
    assert told(capsys, "stage", image, "--dry-run")["complete"] and state(site) == before

    assert main.main(["base", "evict", image]) == 0 and not bases(site)
    before = state(site)
    would = told(capsys, "stage", image, "--dry-run")
    assert state(site) == before
    assert would["hosts"][HERE]["would"] == [f"have base {name}: 4.0 MiB from the store"]
    done = told(capsys, "stage", image)
    assert bases(site) == [name]
    assert (would["transports"], would["unique"]) == (done["transports"], done["unique"])
    assert main.main(["stage", image, "--dry-run"]) == 0


@pytest.mark.fault(83, "a base that was evicted under its leases stays as it is for a dry run")
def test_stage_restores_nothing_by_a_look(site: ActionSite, capsys: pytest.CaptureFixture[str]) -> None:
    image = site.image()
    settled(site, image)
    (name,) = bases(site)
    (site.location / ".semishared/bases" / name / "image").unlink()
    before = state(site)
    assert told(capsys, "stage", str(image), "--dry-run")["complete"]
    assert state(site) == before
    assert told(capsys, "stage", str(image))["complete"] and state(site) != before


@pytest.mark.fault(83, "stage --dry-run names what would be refused, as the session does")
def test_stage_says_what_fails(site: ActionSite, capsys: pytest.CaptureFixture[str]) -> None:
    image, other = site.image(), site.image("other")
    site.source(image).rename(site.top / "away")
    before = state(site)
    words = ("stage", f"{image},{other}")
    would = told(capsys, *words, "--dry-run", code=1)
    assert state(site) == before
    assert f"image {image}" in would["hosts"][HERE]["why"]
    (line,) = would["hosts"][HERE]["would"]
    assert line.startswith(f"have base 100-{other}-")
    assert f"image {image}" in told(capsys, *words, code=1)["hosts"][HERE]["why"]


@pytest.mark.fault(83, "detach --dry-run says which disks are detached, and then these are")
@pytest.mark.parametrize("which", ["vm", "--all", "is staged"])
def test_detach_says_what_it_does(site: ActionSite, capsys: pytest.CaptureFixture[str], which: str) -> None:
    image = site.image(SEMISHARED_LOCAL="remote-first")
    vm = settled(site, image)
    if which == "is staged":
        assert main.main(["stage", str(image)]) == 0
    before = state(site)
    words = ["detach", which if which == "--all" else str(vm)]
    capsys.readouterr()
    assert main.main([*words, "--dry-run", "--json"]) == 0
    lines = list(schemas.objects(capsys.readouterr().out))
    assert state(site) == before
    notes = [line["text"] for line in lines if line.get("event") == "note"]
    come = [f"would have base 100-{image}-" in note and "from the store" in note for note in notes]
    assert come == ([] if which == "is staged" else [True])
    assert (lines[-1]["dry_run"], lines[-1]["detached"], lines[-1]["failed"]) == (True, 0, 0)
    done = told(capsys, *words)
    (would,), (did,) = lines[-1]["rows"], done["rows"]
    assert (would["how"], did["how"]) == ("would detach", "detached")
    assert {**would, "how": "", "seconds": 0} == {**did, "how": "", "seconds": 0}
    assert told(capsys, *words, "--dry-run")["rows"][0]["how"] == "skipped"


@pytest.mark.fault(83, "detach --dry-run fails for the base that cannot come, as detach does")
def test_detach_says_what_fails(site: ActionSite, capsys: pytest.CaptureFixture[str]) -> None:
    image = site.image(SEMISHARED_LOCAL="remote-first")
    vm = settled(site, image)
    site.source(image).rename(site.top / "away")
    before = state(site)
    would = told(capsys, "detach", str(vm), "--dry-run", code=1)
    assert state(site) == before
    did = told(capsys, "detach", str(vm), code=1)
    assert (would["failed"], would["rows"][0]["how"]) == (1, "failed")
    assert {**would["rows"][0], "why": ""} == {**did["rows"][0], "why": ""}


@pytest.mark.fault(83, "publish --dry-run says what is written, and then this is")
@pytest.mark.parametrize("words", [["--due"], [], ["vm"]], ids=" ".join)
def test_publish_says_what_it_does(
    site: ActionSite, capsys: pytest.CaptureFixture[str], words: Sequence[str]
) -> None:
    image = site.image(persistent=True, SEMISHARED_PLACE="local")
    stray = site.image("stray", persistent=True)
    site.oned.image_update(stray, {"SEMISHARED_STATE": "of a VM that is gone"})
    vm, other = settled(site, image, how="ln"), site.vm(site.image("third"))
    vm_notes.leave(other)
    words = ["publish", *(str(vm) if word == "vm" else word for word in words)]
    before = state(site)
    would = told(capsys, *words, "--dry-run")
    assert state(site) == before
    done = told(capsys, *words)
    assert state(site) != before
    assert (would["dry_run"], done["dry_run"]) == (True, False)
    assert {row["vm"]: row["how"] for row in would["vms"]}[vm] == "would publish"

    def as_done(said: Dict[str, Any]) -> str:
        # The moment in which it was seen first, and how it is called.
        return re.sub(r"20\d\d-[-0-9: ]+ UTC", "", json.dumps([said["vms"], said["images"]]))

    assert as_done(would).replace("would publish", "published") == as_done(done)
    assert set(would["images"]) == {str(image), *([str(stray)] if words == ["publish"] else [])}
    assert main.main([*words, "--dry-run"]) == 0


def test_a_dry_run_of_publish_waits_for_none(site: ActionSite, capsys: pytest.CaptureFixture[str]) -> None:
    vm = settled(site, site.image())
    with locks.exclusive(vm_notes.lock()):
        before = state(site)
        assert told(capsys, "publish", "--due", "--dry-run")["vms"][0]["how"] == "would publish"
        assert state(site) == before
    assert site.oned.vm(vm).user_template.get("SEMISHARED") is None


# -- --json ---------------------------------------------------------------------------------------------


def is_locked(site: ActionSite, stack: ExitStack) -> None:
    """Have another publisher at work."""
    vm_notes.leave(site.vm(site.image()))
    stack.enter_context(locks.exclusive(vm_notes.lock()))


def has_a_vm(site: ActionSite, stack: ExitStack) -> None:
    """Have a VM, 0, with nothing to be done."""
    settled(site, site.image())


def has_lost(site: ActionSite, stack: ExitStack) -> None:
    """Have a host that oned does not see."""
    site.oned.hosts[site.oned.host_create("lost.invalid")].state = ERROR


def nothing(site: ActionSite, stack: ExitStack) -> None:
    """Have no VM and no image."""


CASES: List[Tuple[str, Callable[[ActionSite, ExitStack], None]]] = [
    ("attention", nothing),
    ("base list", nothing),
    ("base verify --due", nothing),
    ("base verify --dry-run", nothing),
    ("base prune", nothing),
    ("caps --user one", nothing),
    ("cluster commit --vms 0", has_a_vm),
    ("cluster detach --vms 0", has_a_vm),
    ("cluster status --vms 0", has_a_vm),
    ("commit 0", has_a_vm),
    ("commit 0 --dry-run", has_a_vm),
    ("detach --all", nothing),
    ("detach --all --dry-run", nothing),
    ("detach --due", nothing),
    ("detach --due --dry-run", nothing),
    ("detach 0", has_a_vm),
    ("explain", nothing),
    ("failover lost.invalid --dry-run", has_lost),
    ("fence lost.invalid --check", has_lost),
    ("gc", nothing),
    ("gc --now --dry-run", nothing),
    ("jobs", nothing),
    ("plan delete HERE:SYSTEM/0 0 101", nothing),
    ("pool check HERE", nothing),
    ("pool list HERE", nothing),
    ("publish", nothing),
    ("publish --due", nothing),
    ("publish --due", is_locked),
    ("publish --due --dry-run", is_locked),
    ("setup", nothing),
    ("share list", nothing),
    ("stage --due", nothing),
    ("stage --due --dry-run", nothing),
    ("status", nothing),
]
ELSEWHERE = {"doctor", "support-bundle"}
"""These print whatever they find: tests/operate, test_support_bundle.py."""


@pytest.mark.fault(
    84, "--json prints an object of its schema, also if nothing is to be done or another is at it"
)
@pytest.mark.parametrize(
    ("words", "prepare"), CASES, ids=lambda it: it if isinstance(it, str) else it.__name__
)
def test_json_is_always_one_object_of_its_schema(
    site: ActionSite,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    prepare: Callable[[ActionSite, ExitStack], None],
) -> None:
    monkeypatch.setattr("semishared.front.publication.WAIT_S", 0.0)
    with ExitStack() as stack:
        prepare(site, stack)
        capsys.readouterr()
        verb, *rest = words.replace("HERE", HERE).replace("SYSTEM", str(site.system)).split()
        code = main.main([verb, "--json", *rest])
    said = capsys.readouterr()
    found = list(schemas.objects(said.out))
    assert code in (0, 1, 2) and found, (code, said)
    assert found[-1]["schema"] == 1
    for one in found:
        schemas.compare(verb, one)
    assert [one.get("event") for one in found].count("summary") <= 1


def test_each_verb_with_json_has_a_case() -> None:
    top = parser(every=True)
    choices = next(one.choices for one in top._actions if isinstance(one, argparse._SubParsersAction))
    with_json = {verb for verb in COMMANDS if "--json" in choices[verb]._option_string_actions}
    assert with_json == {words.split()[0] for words, _ in CASES} | ELSEWHERE


@pytest.mark.parametrize("words", ["detach --print-timer", "failover --print-hook", "setup --key"])
def test_what_prints_files_has_no_json(
    site: ActionSite, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert main.main([*words.split(), "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "no --json" in said.err


def test_who_says_no_to_gc_gets_an_object_too(
    site: ActionSite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (site.store / ".semishared/.uploads" / ("c" * 32)).mkdir(parents=True)
    monkeypatch.setattr("semishared.cli.command.is_asked", lambda arguments: True)
    monkeypatch.setattr("builtins.input", lambda: "n")
    capsys.readouterr()
    code = main.main(["gc", "--now", "--json"])
    said = capsys.readouterr()
    answer = json.loads(said.out)
    # A machine without a libvirtd cannot say which guests run.
    assert code == (2 if answer["errors"] else 1)
    assert (answer["totals"]["found"], answer["totals"]["removed"]) == (1, 0)
    assert "would be removed" in said.err and "Go on?" in said.err
