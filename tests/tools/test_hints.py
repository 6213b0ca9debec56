# SPDX-License-Identifier: Apache-2.0
"""What the front-end notes of hosts that are getting a base, when the driver that noted it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from semishared.config import Config
from semishared.errors import BadArguments
from semishared.front import questions
from semishared.plan.base.eviction import Limits

LIB = Path(__file__).resolve().parents[2] / "lib"
NAME = f"100-7-{'a' * 32}"
JOINS = """if True:
    import sys, time
    sys.path.insert(0, sys.argv[1])
    from semishared.front import questions
    questions.join(sys.argv[2], sys.argv[3], "h1")
    print("joined", flush=True)
    time.sleep(60)
"""


def test_driver_that_was_killed_brings_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never says how it went: for an hour who came next was in a chain with it, and had no choice of its
    own.
    """
    monkeypatch.setattr(questions, "_limits", lambda *_: Limits(-1, 0))
    root = str(tmp_path)
    asked: dict[str, object] = {
        "question": "base",
        "name": NAME,
        "bases": [],
        "free": 100,
        "total": 1000,
        "whole": 1000,
        "needed": 1,
    }
    with subprocess.Popen(
        [sys.executable, "-I", "-c", JOINS, str(LIB), root, NAME], stdout=subprocess.PIPE
    ) as driver:
        assert driver.stdout and driver.stdout.readline() == b"joined\n"
        answer = questions.answer(root, asked, "h2", Config())
        assert (answer["sources"], answer["from_store"]) == (["h1"], "last")
        questions.arrived(root, NAME, "h2", False)
        os.kill(driver.pid, signal.SIGKILL)
    answer = questions.answer(root, asked, "h3", Config())
    assert (answer["sources"], answer["from_store"]) == ([], "quicker")


def test_a_front_end_that_is_full_fails_no_deploy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are hints: the host has room, and the store has the base."""
    monkeypatch.setattr(questions, "_limits", lambda *_: Limits(-1, 0))
    asked: dict[str, object] = {
        "question": "base",
        "name": NAME,
        "bases": [],
        "free": 100,
        "total": 1000,
        "whole": 1000,
        "needed": 1,
    }
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "full", str(full)], check=True)
    try:
        with contextlib.suppress(OSError):
            (full / "all").write_bytes(bytes(1 << 20))
        answer = questions.answer(str(full), asked, "h1", Config())
        assert (answer["sources"], answer["from_store"]) == ([], "quicker")
        questions.arrived(str(full), NAME, "h1", True)
        questions.begin(str(full), NAME, ["h2"])
        questions.leave(str(full), NAME, {"h2": True})
        assert questions.holders_of(str(full), NAME) == []
        (full / "all").unlink()
        questions.leave(str(full), NAME, {"h2": True})
        with contextlib.suppress(OSError):
            (full / "all").write_bytes(bytes(1 << 20))
        assert questions.answer(str(full), asked, "h1", Config())["sources"] == ["h2"], (
            "what is known is told"
        )
        with pytest.raises(BadArguments):
            questions.holders_of(str(full), "../locks")
    finally:
        subprocess.run(["umount", str(full)], check=True)
