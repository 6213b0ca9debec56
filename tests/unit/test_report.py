# SPDX-License-Identifier: Apache-2.0
"""The stderr protocol: one line for the user, log lines that cannot crash oned."""

from __future__ import annotations

import io
import re
import sys
from typing import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from semishared.errors import SemisharedError, ToolFailed, catalogue
from semishared.opennebula.args import Subject
from semishared.opennebula.report import LONGEST, Progress, Report, caught, printable

CRASHES_ONED = re.compile(r"^(ERROR|INFO|WARN|DEBUG):\s+\d")
PREFIXED = re.compile(r"^(ERROR|INFO|WARN|DEBUG): ")
text = st.one_of(
    st.text(),
    st.sampled_from(
        [
            "12 is bad",
            "\n12\n13",
            "ERROR: 12",
            "\r\nINFO: 7 x",
            "\x85ERROR: 3",
            "\u2028WARN: 1",
            "\ud800",
            "",
            " ",
            "-",
        ]
    ),
    st.builds(
        "{}{}{}".format,
        st.text(max_size=3),
        st.sampled_from(["\nERROR: 5", "\vINFO:  6", "\x1cDEBUG:\t7"]),
        st.text(max_size=3),
    ),
)


def said(speak: Callable[[Report], None]) -> list[str]:
    """Return the lines that oned reads from stderr."""
    return written(lambda: speak(Report("clone")))


def written(work: Callable[[], object]) -> list[str]:
    stderr = sys.stderr
    sys.stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        work()
        return sys.stderr.buffer.getvalue().decode("utf-8").split("\n")[:-1]
    finally:
        sys.stderr = stderr


@given(text)
def test_no_line_can_crash_oned(detail: str) -> None:
    def speak(report: Report) -> None:
        report.info(detail)
        report.warn(detail)
        report.error(detail)
        report.fail(SemisharedError(detail))

    lines = said(speak)
    assert len(lines) == 4
    assert not any(CRASHES_ONED.match(line) for line in lines)
    assert [bool(PREFIXED.match(line)) for line in lines] == [True, True, True, False]
    assert all(line.isprintable() and line.isascii() for line in lines)


@given(text)
@example("x" * 5000)
def test_fail_is_exactly_one_unprefixed_line(detail: str) -> None:
    lines = said(lambda report: report.fail(SemisharedError(detail)))
    assert len(lines) == 1
    assert lines[0].startswith("SS000 clone: ")
    assert len(lines[0]) <= LONGEST


@pytest.mark.parametrize("error", catalogue(), ids=lambda error: error.id)
def test_the_users_line_says_what_to_do_and_its_id_however_long_the_detail(
    error: type[SemisharedError],
) -> None:
    (line,) = said(lambda report: report.fail(error("it broke " * 1000)))
    assert error.remedy in line
    assert line.startswith(f"{error.id} clone: it broke ") and line.endswith("[clone]")


def failing(error: BaseException) -> Callable[[Report], int]:
    def work(report: Report) -> int:
        report.info("first")
        report.warn("second")
        raise error

    return work


@pytest.mark.fault(
    58,
    "the user's line is the first on stderr: OpenNebula 6.10 keeps its first 100 characters, with log lines",
)
@pytest.mark.parametrize(
    "error", [ToolFailed("it broke"), OSError(5, "it broke"), KeyError("it broke")], ids=repr
)
def test_the_users_line_comes_before_all_log_lines(error: BaseException) -> None:
    lines = written(lambda: caught("clone", failing(error)))
    assert "it broke" in lines[0] and not PREFIXED.match(lines[0])
    assert lines[1:3] == ["INFO: clone: first", "WARN: clone: second"]
    assert all(line.startswith("ERROR: clone: ") for line in lines[3:])
    assert bool(lines[3:]) == isinstance(error, KeyError), "the traceback of a defect, behind all"


def test_log_lines_of_an_action_are_written_when_it_ends_however_it_ends() -> None:
    def done(report: Report) -> int:
        report.info("first")
        assert written(lambda: report.warn("second")) == [], "nothing is written meanwhile"
        return 0

    assert written(lambda: caught("clone", done)) == ["INFO: clone: first", "WARN: clone: second"]
    with pytest.raises(SystemExit):
        lines = written(lambda: caught("clone", failing(SystemExit(3))))
        assert lines == ["INFO: clone: first", "WARN: clone: second"]


@pytest.mark.fault(59, "a line with a letter that is not ASCII reaches an oned without LANG whole")
def test_what_is_not_ascii_is_escaped_so_that_it_can_be_recognised() -> None:
    lines = said(lambda report: report.info("B\xfcro \u732b \U0001f600 of \udcff"))
    assert lines == ["INFO: clone: B\\xfcro \\u732b \\U0001f600 of"]
    (line,) = said(lambda report: report.fail(ToolFailed("B\xfcro")))
    assert line.startswith("SS031 clone: B\\xfcro; ")


def about(subject: Subject) -> list[str]:
    def speak(report: Report) -> None:
        report.subject = lambda: subject
        for text in ("it is so", "VM 12 is so", "VM 12: it is so", "VM 123 is so", "404 not found"):
            report.info(text)

    return said(speak)


def test_log_lines_name_the_vm_behind_the_actions_name() -> None:
    assert about(Subject("VM 12 disk 0", 12)) == [
        "INFO: clone: VM 12: it is so",
        "INFO: clone: VM 12 is so",
        "INFO: clone: VM 12: it is so",
        "INFO: clone: VM 12: VM 123 is so",
        "INFO: clone: VM 12: 404 not found",
    ]
    assert about(Subject("image 7"))[0] == "INFO: clone: it is so"


@given(st.text())
def test_printable_is_one_line(value: str) -> None:
    assert printable(value).isprintable()
    assert len(printable(value)) <= LONGEST


def test_closed_stderr_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, _data: object) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(Closed())))
    Report("clone").info("nobody listens")


def test_lines_of_progress_are_few() -> None:
    now = 100.0
    lines: list[str] = []
    progress = Progress(lines.append, lambda: now)
    for _ in range(700):
        progress.tell("half of it")
        now += 1
    assert lines == [f"after {seconds} s: half of it" for seconds in (10, 20, 40, 80, 160, 320, 640)]


def test_a_line_of_progress_that_is_late_counts_for_those_before() -> None:
    now = 0.0
    lines: list[str] = []
    progress = Progress(lines.append, lambda: now)
    now = 79.0
    progress.tell("a")
    progress.tell("b")
    now = 80.0
    progress.tell("c")
    assert lines == ["after 79 s: a", "after 80 s: c"]
