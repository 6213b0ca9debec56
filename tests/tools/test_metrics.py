# SPDX-License-Identifier: Apache-2.0
"""`semishared metrics` after real actions: what is counted, once; what a killed run leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from lab.oned.objects import History, Host
from semishared.cli import main
from semishared.errors import HostUnreachable, SemisharedError
from semishared.front import action_counts, action_lines
from tools.oned_site import HERE, ROOT, STORE, SYSTEM, ActionSite

FOLD = """
import sys
sys.path.insert(0, {lib!r})
from semishared.front import action_counts
action_counts.SETTLE_S = 0
action_counts.fold(print)
"""
KEY = ("tm/clone", "overlay", "store", "ok")
LINE = "tm/clone overlay store ok 100 2000\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActionSite]:
    with ActionSite.operated(tmp_path / "one", monkeypatch, has_host=True) as up:
        # The lines are this user's, which is root here.
        monkeypatch.setattr(action_counts, "SETTLE_S", 0)
        yield up


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of lines and counts, with nothing in it."""
    monkeypatch.setenv("ONE_AUTH", str(tmp_path / "one_auth"))
    monkeypatch.setattr(action_counts, "SETTLE_S", 0)
    action_counts.lock()
    return tmp_path / "semishared_metrics"


def written(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main.main(["metrics", *words]) == code
    return capsys.readouterr().out


def of(text: str, name: str) -> Dict[Tuple[str, ...], float]:
    """Return the values of a metric by those of its labels; no label here has an escape."""
    found = {}
    for labels, value in re.findall(rf"(?m)^{name}(?:\{{(.*)\}})? (\S+)$", text):
        found[tuple(re.findall(r'"([^"]*)"', labels))] = float(value)
    return found


def folded() -> Dict[Any, int]:
    said: List[str] = []
    found = action_counts.fold(said.append)
    assert said == []
    return {key: counted.times for key, counted in found.actions.items()}


# -- what is written --------------------------------------------------------------------------------


def test_actions_and_what_they_have_made_are_counted(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    image = site.image()
    text = written(capsys)
    assert of(text, "semishared_action_seconds_count") == {}, "before the first run no line is left"
    assert of(text, "semishared_host_up") == {(HERE,): 1} and of(text, "semishared_bases") == {(HERE,): 0}
    first, second = site.vm(image), site.vm(image)
    for vm in (first, second):
        site.make("clone", vm)
    # A hit, a miss, and one that is refused.
    site.refused("SS020", site.tm, "clone", "fe:/x", f"{HERE}:{site.disk(second)}", second, STORE)
    kept = site.image("mine", persistent=True, SEMISHARED_PLACE="local")
    third = site.vm(kept)
    held = site.oned.vm(third)
    held.history.append(History(third, 0, Host(0, HERE, "kvm"), "semishared", SYSTEM))
    site.make("ln", third)

    text = written(capsys)
    counts = of(text, "semishared_action_seconds_count")
    assert (
        counts["tm/clone", "overlay", "store", "ok"] == 1 and counts["tm/clone", "overlay", "none", "ok"] == 1
    )
    assert counts["tm/clone", "overlay", "none", "SS020"] == 1
    assert counts["tm/ln", "diff", "base", "ok"] == 1, "its content is that of the other image"
    assert of(text, "semishared_base_uses_total") == {("hit",): 1, ("miss",): 2}
    assert counts["datastore/cp", "none", "none", "ok"] == 1, "of the one that came after the first run"
    sizes = of(text, "semishared_action_bytes_sum")
    assert 0 < sizes["tm/clone", "overlay", "store", "ok"] <= 8 << 20
    assert sizes["datastore/cp", "none", "none", "ok"] > 0
    assert of(text, "semishared_bases") == {(HERE,): 2}
    assert of(text, "semishared_base_leases") == {(HERE,): 3}
    disks = of(text, "semishared_disks")
    assert disks[HERE, "overlay"] == 2 and disks[HERE, "diff"] == 1 and disks[HERE, "copy"] == 0
    assert of(text, "semishared_floor_bytes")[(HERE,)] == int(
        of(text, "semishared_size_bytes")[(HERE,)] * 0.05
    )
    again = written(capsys)
    assert of(again, "semishared_action_seconds_count") == counts, "nothing is counted twice"
    assert not re.search(r"image|\bmine\b", re.sub(r"(?m)^# .*\n", "", text)), "no image is named"


def test_a_file_is_replaced_as_a_whole(
    site: ActionSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out" / "semishared.prom"
    target.parent.mkdir()
    (target.parent / ".staged-semishared.prom.left").write_text("of a killed run")
    assert written(capsys, "--output", str(target)) == ""
    assert target.read_text().startswith("# HELP semishared_build_info ")
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert target.stat().st_mode & 0o777 == 0o644, "node_exporter is another user"
    before = target.stat().st_ino
    assert site.oned.rpc
    os.environ["ONE_XMLRPC"] = "http://127.0.0.1:1/RPC2"
    written(capsys, "--output", str(target), code=2)
    assert target.stat().st_ino == before, "without oned it stays as it was"


def test_a_host_that_does_not_answer_is_down_and_nothing_fails(
    site: ActionSite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.oned.host_create("h9.invalid")
    capsys.readouterr()
    assert main.main(["metrics"]) == 0
    said = capsys.readouterr()
    assert of(said.out, "semishared_host_up") == {(HERE,): 1, ("h9.invalid",): 0}
    assert "h9.invalid: SS010" in said.err and (HERE,) in of(said.out, "semishared_free_bytes")
    assert ("h9.invalid",) not in of(said.out, "semishared_free_bytes")


# -- lines ------------------------------------------------------------------------------------------


def leave(error: Any = None, **moved: int) -> None:
    action_lines.leave("tm/clone", time.monotonic() - 0.5, [], [moved, {}], error)


def test_without_the_directory_no_line_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE_AUTH", str(tmp_path / "one_auth"))
    leave()
    assert list(tmp_path.iterdir()) == []


def test_where_bytes_come_from_and_how_it_ended(folder: Path) -> None:
    leave(store_read=5, received=7, sent=100)
    leave(reused=5, store_written=90)
    leave(HostUnreachable("h1"))
    leave(KeyError("a defect"))
    leave(OSError(28, "No space left on device"))
    words = [line.split() for line in (folder / "actions").read_text().splitlines()]
    assert [(each[1], each[2], each[3], each[5]) for each in words] == [
        ("none", "peer", "ok", "12"),
        ("none", "base", "ok", "95"),
        ("none", "none", "SS010", "0"),
        ("none", "none", SemisharedError.id, "0"),
        ("none", "none", "SS030", "0"),
    ]
    assert all(500 <= int(each[4]) < 60_000 for each in words)
    assert max(map(len, (folder / "actions").read_text().splitlines())) < 200


@pytest.mark.parametrize("other", ["link", "directory", "fifo", "foreign"])
def test_another_thing_in_its_place_is_left_alone(
    folder: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, elsewhere = folder / "actions", folder.parent / "elsewhere"
    elsewhere.write_text("")
    if other == "link":
        path.symlink_to(elsewhere)
    elif other == "directory":
        path.mkdir()
    elif other == "fifo":
        os.mkfifo(path)
    else:
        path.write_text("")
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    leave()
    assert elsewhere.read_text() == "" and (other != "foreign" or path.read_text() == "")


def test_the_file_does_not_grow_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_lines, "MOST", 100)
    for _ in range(50):
        leave()
    assert 100 <= (folder / "actions").stat().st_size < 200


def test_lines_of_many_at_once_do_not_mix(folder: Path) -> None:
    workers = [threading.Thread(target=lambda: [leave() for _ in range(200)]) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert folded() == {("tm/clone", "none", "none", "ok"): 1600}


# -- counts -----------------------------------------------------------------------------------------


def kill_at(number: int) -> int:
    env = {**os.environ, "SEMISHARED_KILL_AT": str(number)}
    code = FOLD.format(lib=str(ROOT / "lib"))
    return subprocess.run([sys.executable, "-I", "-c", code], env=env, check=False, timeout=60).returncode


@pytest.mark.starts
def test_a_run_that_is_killed_anywhere_counts_once(folder: Path) -> None:
    """The next run, and one that is killed at the same point again, come to the same counts."""
    wanted, number, killed = 0, 1, True
    while killed:
        for _ in range(2):
            (folder / "actions").write_text(LINE * 3)
            wanted += 3
            killed = kill_at(number) == -9
        assert folded() == {KEY: wanted}, f"killed at point {number}"
        assert sorted(path.name for path in folder.iterdir() if path.name != "lock") == ["counts"]
        number += 1
    assert number > 4, "it has these points"


def test_what_is_no_line_is_counted_as_that(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_counts, "MOST", 1)
    bad = [
        "tm/clone overlay store ok 100",
        "tm/clone overlay store ok 100 -1",
        "tm/clone overlay store ok 100 1 1",
        f"tm/clone overlay store ok 100 1{'0' * 16}",
        "tm/clone web-server store ok 1 1",
        'tm/clone"} overlay store ok 1 1',
        "tm/clone overlay store SS9 1 1",
        "",
        "\xff",
        "tm/ln diff none ok 1 1",  # one combination more than there may be
    ]
    (folder / "actions").write_bytes((LINE + "\n".join(bad) + "\n" + LINE).encode("latin-1"))
    counts = action_counts.fold(print)
    assert (counts.actions[KEY].times, len(counts.actions), counts.uncounted) == (2, 1, len(bad))


DAMAGES = [
    b"",
    b"{",
    b"[]",
    b'{"version": 2}',
    b'{"version": 1, "seconds": [1], "bytes": [], "folded": 1, "uncounted": 0, "actions": {}}',
]


@pytest.mark.parametrize("damage", [*DAMAGES, "actions", "folded", "a count", "a directory"])
def test_damaged_counts_begin_at_0_and_that_is_said(folder: Path, damage: Any) -> None:
    path = folder / "counts"
    (folder / "actions").write_text(LINE)
    assert folded() == {KEY: 1}
    text = path.read_bytes()
    if damage == "actions":
        path.write_bytes(text.replace(b'"actions": {', b'"actions": [], "x": {'))
    elif damage == "folded":
        path.write_bytes(re.sub(rb'"folded": \d+', b'"folded": true', text))
    elif damage == "a count":
        path.write_bytes(text.replace(b": [1, 100", b": [-1, 100"))
    elif damage == "a directory":
        path.unlink()
        path.symlink_to("/")
    else:
        path.write_bytes(damage)
    # Lines with a number that the damaged file had counted, or not: they are in no counts now.
    (folder / "taken.7").write_text(LINE)
    (folder / "actions").write_text(LINE)
    said: List[str] = []
    found = action_counts.fold(said.append)
    assert found.actions[KEY].times == 2 and found.folded == 8
    assert len(said) == 1 and said[0].startswith("actions are counted from 0 again: ")
    assert folded() == {KEY: 2}


def test_combinations_of_another_version_are_left_out(folder: Path) -> None:
    (folder / "actions").write_text(LINE)
    folded()
    path = folder / "counts"
    path.write_text(path.read_text().replace("tm/clone", "tm/of_later"))
    assert folded() == {}


def test_runs_at_the_same_time_wait_for_each_other(
    site: ActionSite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from semishared.cli import metrics
    from semishared.tools import locks

    monkeypatch.setattr(metrics, "LOCK_S", 0.1)
    with locks.exclusive(action_counts.lock()):
        assert main.main(["metrics"]) == 2
    assert "is held by another action" in capsys.readouterr().err
    written(capsys)


def test_names_are_those_of_the_table(folder: Path) -> None:
    """Each step that a line takes for a place is a step of ours."""
    from semishared.model import steps
    from semishared.model.disk import commit_steps
    from semishared.model.disk.place import PLACES

    known = SimpleNamespace(**vars(steps), **{"CreateDiff": commit_steps.CreateDiff})
    assert all(hasattr(known, name) for name in action_lines.MADE)
    assert set(action_lines.MADE.values()) == set(PLACES)
