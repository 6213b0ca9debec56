# SPDX-License-Identifier: Apache-2.0
"""Unit tests cannot touch the machine: no program, no network, no file outside of temporary directories.

An audit hook sees what Python does wherever it does it, so that no module has to be patched. It raises, and
because code under test may catch that, it also remembers: the test fails when it ends.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Iterator

import pytest

CHECKOUT = str(Path(__file__).resolve().parents[2])
STARTS = (
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.forkpty",
    "os.spawn",
    "os.system",
    "pty.spawn",
)
CONNECTS = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
CHANGES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "os.chmod",
    "os.chown",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
REGENERATED = f"{CHECKOUT}/tests/unit/" if os.environ.get("REGENERATE") else ""
READ = ("/usr/", "/proc/self", "/proc/sys/kernel/random/boot_id", "/dev/urandom", "/etc/localtime")
OWN_FILES = ("/.hypothesis", "/.pytest_cache", "/__pycache__")
"""Of the test tools themselves."""


class Watch:
    """What the running test may do, and what it did that it may not."""

    def __init__(self) -> None:
        self.active = False
        self.may_start = ""
        self.temporary = (tempfile.gettempdir(),)
        self.crimes: list[str] = []

    def hook(self, event: str, args: tuple[object, ...]) -> None:
        if self.active:
            crime = self.judge(event, args)
            if crime:
                self.crimes.append(crime)
                raise RuntimeError(f"a unit test may not {crime}")

    def judge(self, event: str, args: tuple[object, ...]) -> str:
        if event in STARTS:
            program = str(args[0] if args else "")
            return "" if self.may_start and program == self.may_start else f"start {program}"
        if event in CONNECTS:
            return f"use the network: {event} {args[1:]}"
        if event == "open":
            path, _, flags = args
            if isinstance(path, int) or not isinstance(flags, int):
                return ""
            return self.outside(path, "write") if flags & WRITING else self.outside(path, "read")
        # With a directory's descriptor the path says little; that directory was opened, and judged, before.
        if event in CHANGES and not isinstance(args[0], int):
            name, has_directory = (
                os.fsdecode(args[0]),  # type: ignore[arg-type]
                any(isinstance(arg, int) and arg >= 0 for arg in args[1:]),
            )
            return "" if has_directory and not os.path.isabs(name) else self.outside(name, "change")
        return ""

    def outside(self, path: object, verb: str) -> str:
        if isinstance(path, int) or path is None:
            return ""
        name = os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]
        # A checkout may itself lie in a directory for temporary files.
        in_checkout = name.startswith(f"{CHECKOUT}/")
        if (
            # An open directory was judged when it was opened.
            name.startswith("/proc/self/fd/")
            or (name.startswith(self.temporary) and not in_checkout)
            or any(part in name for part in OWN_FILES)
            or name == "/dev/null"
        ):
            return ""
        if REGENERATED and name.startswith(REGENERATED):
            return ""
        if verb == "read" and name.startswith((CHECKOUT, sys.prefix, *READ)):
            return ""
        return f"{verb} {name}"


WATCH = Watch()
sys.addaudithook(WATCH.hook)


@pytest.fixture(autouse=True)
def _cannot_touch_the_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    WATCH.crimes.clear()
    WATCH.may_start = sys.executable if request.node.get_closest_marker("runs_python") else ""
    WATCH.active = True
    try:
        yield
    finally:
        WATCH.active = False
    if WATCH.crimes:
        pytest.fail(f"a unit test may not {WATCH.crimes[0]}", pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def _no_name_leads_here() -> Iterator[None]:
    """Which addresses a name has, only a network can say."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("semishared.tools.this_machine"):  # versions of before ask no network (tests/against.py)
            patch.setattr("semishared.tools.this_machine._leads_here", lambda host: False)
        yield


@pytest.fixture()
def watch() -> Watch:
    """For the test of the watch itself."""
    return WATCH
