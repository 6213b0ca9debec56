# SPDX-License-Identifier: Apache-2.0
"""`semishared --version` says which commit it is of, and none where that is not certain."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from semishared import VERSION
from semishared.install.commit import DIGITS, INSTALLED
from semishared.wire.messages import release

ROOT = Path(__file__).resolve().parents[2]
STOCK = ROOT / "tests" / "lab" / "stock"
PLAIN = f"semishared {VERSION}"


def said(command: Path) -> str:
    done = subprocess.run([str(command), "--version"], cwd="/", capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.rstrip("\n")


def git(folder: Path, *words: str) -> str:
    """Run git there as a committer who is always the same."""
    who = {
        f"GIT_{role}_{what}": "x@example.org"
        for role in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    env = {"PATH": os.environ["PATH"], "HOME": "/", **who}
    return subprocess.run(
        ["git", "-C", str(folder), *words], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with the files of this one, in a repository of its own."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for part in ("COMMIT", ".gitattributes", ".gitignore", *INSTALLED):
        source = ROOT / part
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, checkout / part, ignore=ignored)
        else:
            shutil.copy2(source, checkout / part)
    git(checkout, "init", "--quiet")
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message=first")
    return checkout


def test_a_checkout_says_its_commit_and_whether_it_was_changed(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")[:DIGITS]
    assert said(repository / "bin/semishared") == f"{PLAIN} ({head})"
    (repository / "README.md").write_text("no part of what is installed\n")
    assert said(repository / "bin/semishared") == f"{PLAIN} ({head})"
    (repository / "tm/clone").write_text("#!/bin/sh\n")
    assert said(repository / "bin/semishared") == f"{PLAIN} ({head}, changed)"


def test_asking_git_writes_nothing_into_the_checkout(repository: Path) -> None:
    """root may ask, in a checkout that is a user's."""
    (repository / "tm/clone").touch()
    index = (repository / ".git/index").stat()
    said(repository / "bin/semishared")
    assert (repository / ".git/index").stat().st_ino == index.st_ino


def test_an_archive_says_its_commit_without_git(repository: Path, tmp_path: Path) -> None:
    archive = unpacked(repository, tmp_path / "archive")
    head = git(repository, "rev-parse", "HEAD")[:DIGITS]
    assert said(archive / "bin/semishared") == f"{PLAIN} ({head})"


def unpacked(repository: Path, target: Path) -> Path:
    target.mkdir()
    words = ["git", "-C", str(repository), "archive", "HEAD"]
    packed = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "--extract", "--file=-"], cwd=target, input=packed, check=True)
    return target


@pytest.mark.fault(79, "`semishared --version` names no commit of another repository that it lies in")
def test_no_commit_of_another_repository(repository: Path, tmp_path: Path) -> None:
    around = tmp_path / "around"
    shutil.copytree(repository, around / "ours", ignore=shutil.ignore_patterns(".git"))
    git(around, "init", "--quiet")
    git(around, "add", "--all")
    git(around, "commit", "--quiet", "--message=theirs")
    assert said(around / "ours/bin/semishared") == PLAIN
    # What says its commit itself says its own one there, too.
    archive = unpacked(repository, around / "archive")
    assert said(archive / "bin/semishared") == f"{PLAIN} ({git(repository, 'rev-parse', 'HEAD')[:DIGITS]})"


@pytest.mark.parametrize("text", ["", "abc", "$Format:%H", "g" * 40, "\0", "é" * 40])
def test_no_commit_of_what_says_none(repository: Path, text: str) -> None:
    (repository / "COMMIT").write_text(text)
    assert said(repository / "bin/semishared") == PLAIN
    (repository / "COMMIT").unlink()
    assert said(repository / "bin/semishared") == PLAIN


def test_an_installation_says_it_and_the_release_is_that_of_the_package_alone(
    repository: Path, tmp_path: Path
) -> None:
    """Front-end and hosts of two commits with the same package understand each other."""
    found = []
    for name in ("one", "two", "archive"):
        checkout = unpacked(repository, tmp_path / "archive") if name == "archive" else repository
        remotes = tmp_path / name / "remotes"
        shutil.copytree(STOCK, remotes)
        words = [str(checkout / "install.sh"), "--remotes", str(remotes)]
        subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=True)
        package = remotes / "lib/semishared"
        commit = git(repository, "rev-parse", "HEAD")[:DIGITS]
        assert said(package / "semishared") == f"{PLAIN} ({commit})", name
        found.append(release(str(package)))
        if name == "one":
            git(repository, "commit", "--quiet", "--allow-empty", "--message=second")
    assert len(set(found)) == 1 and re.fullmatch(rf"{re.escape(VERSION)}\+[0-9a-f]{{12}}", found[0])
