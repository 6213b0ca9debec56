# SPDX-License-Identifier: Apache-2.0
"""Manual pages and completion of the operator's command: programs find all verbs and options in them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from semishared.cli.main import COMMANDS
from unit.test_cli_page import options

ROOT = Path(__file__).resolve().parents[2]
MAN, BASH = ROOT / "share/man/man1", ROOT / "share/bash-completion/completions/semishared"
ZSH = ROOT / "share/zsh/site-functions/_semishared"
FISH = ROOT / "share/fish/vendor_completions.d/semishared.fish"


@pytest.mark.parametrize("verb", COMMANDS)
def test_manual_page_has_all_arguments_and_groff_takes_it(verb: str) -> None:
    page = MAN / f"semishared-{verb}.1"
    text = page.read_text().replace("\\", "")
    assert options(verb) - {"--help"} <= set(re.findall(r"fB(--[a-z-]+)fR", text))
    assert f"semishared-{verb} - {COMMANDS[verb]}\n" in text
    assert f".BR semishared-{verb} (1)" in (MAN / "semishared.1").read_text().replace("\\", "")
    if shutil.which("groff"):
        for name in (page, MAN / "semishared.1"):
            done = subprocess.run(["groff", "-man", "-ww", "-z", str(name)], capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")


def test_there_is_no_page_of_a_verb_that_there_is_not() -> None:
    assert {path.name for path in MAN.iterdir()} == {
        "semishared.1",
        *(f"semishared-{verb}.1" for verb in COMMANDS),
    }


COMPLETED = """source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_shtab_semishared; printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(*words: str) -> set[str]:
    """Return what bash offers for the last word."""
    done = subprocess.run(["bash", "-c", COMPLETED, "-", str(BASH), *words], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    return set(done.stdout.split())


def test_bash_completes_verbs_and_their_options() -> None:
    assert completed("semishared", "st") == {"stage", "status"}
    assert completed("semishared", "detach", "--transport", "") == {"auto", "multicast", "chain", "unicast"}
    for verb in COMMANDS:
        # After REMAINDER all is an argument of the action.
        assert completed("semishared", verb, "--") >= options(verb) - {"--help"} or verb == "plan"


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_reads_its_completion() -> None:
    done = subprocess.run(["zsh", "-n", str(ZSH)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes_verbs(tmp_path: Path) -> None:
    text = f'source {FISH}; complete -C "semishared st"; complete -C "semishared detach --tr"'
    done = subprocess.run(
        ["fish", "--no-config", "-c", text],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    found = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert (done.returncode, found) == (0, ["stage", "status", "--transport"])
