# SPDX-License-Identifier: Apache-2.0
"""Notes of what a process moves: written where that is ours, read back as what anybody may have written."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, Callable

import pytest

from semishared.cli import command, terminal
from semishared.cli import jobs as of_cli
from semishared.errors import FalseAnswer
from semishared.host import jobs as of_host
from semishared.host.service import Noting
from semishared.model import answers, job_steps
from semishared.model import steps as s
from semishared.model.disk.commit_steps import CommitDisk
from semishared.model.job_steps import Job, ListJobs
from semishared.named import to_data
from semishared.tools import jobs, owner, progress

MiB = 1 << 20
GONE = 1 << 22
"""No process has that id: it is above the largest."""
ONE = Job(
    7, "1", "clone", "fetch", 5, 0, "image 7", "h2", "", 41 * MiB, 100 * MiB, 80 * MiB, 1700000000, "oned"
)
DISK = s.DiskRef(5, 1, "/var/lib/one/datastores/101/5")
IMAGE = s.ImageRef(100, 7, "raw", "/var/lib/one/datastores/100/image")


@pytest.fixture
def run_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    at = tmp_path / "one"
    at.mkdir()
    monkeypatch.setattr(jobs, "RUN", str(at))
    return at


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("goal", "asked_by", "moved"):
        monkeypatch.setattr(progress, name, type(getattr(progress, name))())
    # Of all processes only this one is there; real ones: tests/tools/test_jobs.py.
    here, started = os.getpid(), owner.started(os.getpid())
    monkeypatch.setattr(owner, "waiting", lambda pid: started if pid == here else "")


def put(run_one: Path, name: str, data: Any) -> Path:
    (run_one / jobs.FOLDER).mkdir(exist_ok=True)
    path = run_one / jobs.FOLDER / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def mine(**more: Any) -> dict[str, Any]:
    """Return the data of a note of this process."""
    here = ONE._replace(pid=os.getpid(), started=owner.started(os.getpid()))
    return {"version": jobs.VERSION, **to_data(here), **more}


def test_a_note_says_how_far_its_work_is_and_goes_with_it(run_one: Path) -> None:
    progress.expect(10 * MiB, "h2")
    note = jobs.Note("clone", "fetch", vm=5, disk=1, since_s=2)
    progress.count("received", 4 * MiB)
    note.look()
    (job,) = of_host.listed()
    assert (job.vm, job.disk, job.done, job.of, job.source) == (5, 1, 4 * MiB, 10 * MiB, "h2")
    assert 1 * MiB < job.rate < 3 * MiB, "4 MiB in the 2 seconds before it was noted"
    assert job.asked_by == "oned"
    note.end()
    assert of_host.listed() == []
    assert list((run_one / jobs.FOLDER).iterdir()) == []


@pytest.mark.parametrize(
    "said",
    [
        lambda: progress.count("store_read", 4 * MiB),
        lambda: (progress.count("store_read", 4 * MiB), progress.count("sent", 3 * MiB)),
        lambda: progress.reached(4 * MiB, 8 * MiB),
    ],
)
def test_bytes_that_are_read_and_written_count_once(run_one: Path, said: Callable[[], object]) -> None:
    progress.count("store_read", 9 * MiB)
    progress.expect()
    said()
    assert progress.goal.done() == 4 * MiB


def test_work_that_moves_nothing_is_not_noted(run_one: Path) -> None:
    note = jobs.Note("clone", "work")
    note.look()
    progress.count("received", 1000)
    note.look()
    assert list(run_one.iterdir()) == []


@pytest.mark.fault(75, "what an action moves is seen while it moves it, and not after")
@pytest.mark.parametrize("pid", [GONE, os.getpid()], ids=["gone", "another process has its id"])
def test_a_note_of_a_process_that_is_gone_is_removed(run_one: Path, pid: int) -> None:
    path = put(run_one, f"{pid}.json", {**to_data(ONE._replace(pid=pid)), "version": 1})
    half = put(run_one, f".{GONE}.json", '{"pi')
    assert of_host.listed() == []
    assert not path.exists() and not half.exists()


HOSTILE = [
    "",
    "{",
    "[" * 5000,
    "null",
    "[]",
    {},
    mine(pid="7"),
    mine(version=2),
    mine(done=-1),
    mine(done=1 << 70),
    mine(source=["h2"]),
    mine(vm=None),
    mine(started=None),
    mine(image="x" * 5000),
]


@pytest.mark.parametrize("data", HOSTILE)
def test_what_no_mover_has_written_is_not_shown(run_one: Path, data: Any) -> None:
    put(run_one, f"{os.getpid()}.json", data)
    put(run_one, "a note.json", mine())
    put(run_one, f"{os.getppid()}.json", mine())
    assert of_host.listed() == []


def test_a_note_that_is_no_file_is_passed_over(run_one: Path, tmp_path: Path) -> None:
    aside = tmp_path / "aside"
    aside.write_text(json.dumps(mine()))
    (run_one / jobs.FOLDER).mkdir()
    (run_one / jobs.FOLDER / f"{os.getpid()}.json").symlink_to(aside)
    os.mkfifo(run_one / jobs.FOLDER / f"{os.getppid()}.json")
    assert of_host.listed() == []
    assert aside.exists()


@pytest.mark.parametrize("which", ["one", jobs.FOLDER])
def test_a_directory_that_is_a_link_is_not_followed(run_one: Path, tmp_path: Path, which: str) -> None:
    aside = tmp_path / "aside"
    aside.mkdir()
    if which == "one":
        run_one.rmdir()
        run_one.symlink_to(aside)
    else:
        (run_one / which).symlink_to(aside)
    progress.expect(MiB)
    note = jobs.Note("clone", "fetch")
    note.look()
    note.end()
    assert list(aside.iterdir()) == [] and of_host.listed() == []


def test_a_directory_of_another_user_is_left_alone(run_one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(run_one, f"{GONE}.json", {**to_data(ONE._replace(pid=GONE)), "version": 1})
    monkeypatch.setattr(os, "geteuid", lambda: 9869)
    progress.expect(MiB)
    jobs.Note("clone", "fetch").look()
    assert of_host.listed() == [] and path.exists()


def test_a_host_side_notes_the_step_that_is_under_way(run_one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    noting = Noting()
    fetch, commit = s.StageBase("/var/lib/one/datastores/.semishared", IMAGE), CommitDisk(DISK, 0)
    noting.plan("clone", [fetch, commit])
    noting.begin(fetch)
    progress.expect(MiB)
    clock[0] += 1
    noting.look()
    assert of_host.listed() == [], "it may be short"
    clock[0] += 1
    noting.look()
    (job,) = of_host.listed()
    assert (job.action, job.step, job.vm, job.disk, job.image) == ("clone", "fetch", 5, 1, "image 7")
    noting.begin(commit)
    noting.look()
    assert of_host.listed() == []
    progress.expect(MiB)
    clock[0] += 2
    noting.look()
    assert [job.step for job in of_host.listed()] == ["commit"]
    noting.begin(None)
    assert of_host.listed() == []
    noting.look()
    assert of_host.listed() == []


def test_a_lying_answer_is_no_list_of_jobs() -> None:
    good = answers.one("h1", ListJobs, [to_data(ONE)])
    assert good == [ONE]
    lies: list[Any] = [[{}], {}, [{**to_data(ONE), "done": -1}], [None]]
    for bad in lies:
        with pytest.raises(FalseAnswer):
            answers.one("h1", ListJobs, bad)


MANY = [(f"compute-{n}.example.org", ONE._replace(pid=n, asked_by="oneadmin/stage")) for n in range(40)]


@pytest.mark.fault(76, "bars of any number of hosts fit the terminal, and nothing of them stays behind")
@pytest.mark.parametrize(("columns", "high"), [(80, 24), (40, 24), (30, 4), (120, 60)])
def test_the_table_fits_the_terminal(columns: int, high: int) -> None:
    page = of_cli.screen(of_cli.lines(MANY, columns), ["h9: is away " * 20], columns, high)
    assert len(page) <= high and max(map(len, page)) <= columns
    assert page[0].split()[0] == "ON"
    if high == 24:
        assert page[-2] == "and 19 more" and page[-1].startswith("h9: is away")
    if columns >= 80:
        assert " 41 % " in page[1] and "80.0 MiB/s" in page[1] and "h2" in page[1]


def test_the_table_fits_80_columns_where_there_is_no_terminal() -> None:
    head, row = of_cli.lines(MANY[:1])
    assert head.split() == ["ON", "WHAT", "VM/DISK", "DONE", "RATE", "FROM", "SINCE", "ASKED", "BY"]
    assert len(row) <= 80 and "fetch" in row and "5/0" in row
    assert of_cli.lines([]) == ["nothing is moved"]


def test_what_a_host_says_controls_no_terminal() -> None:
    evil = ONE._replace(source="\x1b[2Jh2\nh3", asked_by="\x9bx", image="a\tb", vm=-1)
    for line in of_cli.lines([("h1", evil)], 80):
        assert line.isprintable()


def test_a_watch_on_no_terminal_prints_blocks_and_ends_at_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = [[("h1", ONE)], []]

    def jobs_of(machines: of_cli.Machines) -> Any:
        if not rounds:
            raise KeyboardInterrupt
        return rounds.pop(0)

    monkeypatch.setattr(command, "administrator", lambda: None)
    monkeypatch.setattr(command, "refuse_root", lambda why="": None)
    monkeypatch.setattr(of_cli.Machines, "jobs", jobs_of)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert of_cli.run(argparse.Namespace(watch=True, json=False)) == 0
    head, row, empty, nothing, end = capsys.readouterr().out.splitlines()
    assert head.startswith("ON ") and row.startswith("h1 ") and nothing == "nothing is moved"
    assert (empty, end) == ("", "")


def test_a_job_in_words() -> None:
    assert of_cli.told([ONE]) == "copying, 41 %, 80.0 MiB/s from h2"
    commit = ONE._replace(step="commit", source="", target="the store", of=0)
    assert of_cli.told([commit]) == "committing, 41.0 MiB of ?, 80.0 MiB/s to the store"
    assert of_cli.told([]) == ""
    assert job_steps.far(ONE._replace(done=100 * MiB - 1)) == "99 %"


def test_texts_are_cut_by_what_is_there() -> None:
    assert [terminal.cut("compute", width) for width in (9, 7, 6, 3, 2, 1, 0)] == [
        "compute",
        "compute",
        "comp..",
        "c..",
        "..",
        ".",
        "",
    ]
