# SPDX-License-Identifier: Apache-2.0
"""What the drivers' user may do: by the real sudo, with the lines for sudoers that the page has, in a mount
namespace of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.caches import CHECKOUT
from semishared.model.share import steps as share_steps
from semishared.model.share.share import Share, Tree
from semishared.model.steps import Step, to_data
from shares.page import ROOT, rule

MiB = 1 << 20
MARKER = "0123456789abcdef" * 2
USER = "nobody"
ENTER = f"""
set -eu
mount -t tmpfs -o mode=755 tmpfs /srv
mkdir {ROOT} /srv/checkout
mount --bind "$CHECKOUT" /srv/checkout
mount --bind "$MADE" {ROOT}
chown {USER}: {ROOT}
install -m 644 "$JOB" /srv/job
install -m 440 "$RULE" /srv/sudoers
mount --bind /srv/sudoers /etc/sudoers
install -D -m 755 /srv/checkout/lib/semishared/share/as_root.py /srv/sbin/semishared-btrfs
mount --bind /srv/sbin /usr/local/sbin
exec setpriv --reuid {USER} --regid nogroup --clear-groups "$@" /srv/job
"""


class Unprivileged:
    """The host side, as a user who owns the root of shares and nothing else."""

    def __init__(self, made: Path, top: Path) -> None:
        self._made, self._job, self._rule = made, top / "job", top / "rule"
        self.allow("")

    def allow(self, text: str) -> None:
        """Let sudo go by these lines."""
        self._rule.write_text(text)

    def does(self, step: Step) -> str:
        """Carry out a step; return what is said of it if it fails."""
        self._job.write_text(json.dumps(to_data(step)))
        done = self._run("-m", "shares.once")
        return done.stderr if done.returncode else ""

    def runs(self, code: str) -> str:
        """Run a piece of Python; return what it prints."""
        self._job.write_text("")
        done = self._run("-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "MADE": str(self._made), "JOB": str(self._job), "RULE": str(self._rule)}
        # Others than root may not be let pass to where the checkout lies.
        env["CHECKOUT"], env["PYTHONPATH"] = str(CHECKOUT), "/srv/checkout/lib:/srv/checkout/tests"
        argv = ["unshare", "-m", "sh", "-c", ENTER, "enter", sys.executable, "-B", *words]
        return subprocess.run(
            argv, env=env, capture_output=True, text=True, check=False, timeout=120, cwd="/"
        )


WORKS = """
from semishared.share import rights
from semishared.tools import progress
progress.limit_s = 0.3
print(rights.run(["sh", "-c", "for round in $(seq 50); do sleep 0.1; done; echo ended"], long=True))
"""
HANGS = f"""
import time
from semishared.errors import ToolTimeout
from semishared.share import rights
from semishared.tools import locks, progress
progress.limit_s = 0.3
since = time.monotonic()
with locks.exclusive("{ROOT}/lock") as lock, rights.holding(lock):
    try:
        rights.run(["sleep", "7"], long=True)
    except ToolTimeout as e:
        print(e)
print("held" if locks.is_held("{ROOT}/lock") else "free", time.monotonic() - since < 7)
with locks.exclusive("{ROOT}/lock"):
    print(time.monotonic() - since >= 7)
"""


def test_what_root_does_for_us_may_take_as_long_as_it_works_and_has_the_lock_until_it_ends(
    tmp_path: Path,
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    user = Unprivileged(made, tmp_path)
    user.allow(f"{USER} ALL=(root) NOPASSWD: ALL\n")
    # Longer than a busy machine may have to write out (tools/progress.py, LONGEST).
    assert user.runs(WORKS) == "ended\n\n"
    said, held, after = user.runs(HANGS).splitlines()
    assert "sudo has done nothing" in said and held == "held True" and after == "True"


def test_what_only_root_may_do_goes_by_the_lines_of_the_page_and_by_nothing_less(
    btrfs: Path, tmp_path: Path
) -> None:
    made = btrfs / tmp_path.name
    made.mkdir()
    user, tree = Unprivileged(made, tmp_path), Tree("btrfs", ROOT, MARKER)
    steps: list[Step] = [
        share_steps.MarkRoot(tree, MARKER),
        share_steps.MakeShare(tree, Share(7, 0, 1, 8 * MiB)),
        share_steps.ListShares(tree),
        share_steps.ResizeShare(tree, 7, 16 * MiB),
        share_steps.MakeSnapshot(tree, 7, "one"),
        share_steps.MakeSnapshot(tree, 7, "a.two-3"),
        share_steps.RemoveSnapshot(tree, 7, "one"),
        share_steps.RemoveShare(tree, 7, f"{ROOT}/share-7"),
    ]
    assert "SS171" in user.does(steps[0])
    lines = rule(USER).splitlines(keepends=True)
    user.allow("".join(line for line in lines if "/chown" not in line))
    assert user.does(steps[0]) == "" and "chown" in user.does(steps[1])
    user.allow("".join(lines))
    assert [user.does(step) for step in steps] == [""] * 8
    assert os.listdir(made) == [".semishared"]


FOLLOWED = f"""
import os, subprocess
from semishared.model.share.share import Tree
from semishared.share import of
for argv in of(Tree("btrfs", "{ROOT}", "{MARKER}")).commands():
    for name in ("share-0", "gone-0", "snapshot-0-x"):
        if os.path.lexists("{ROOT}/" + name):
            os.unlink("{ROOT}/" + name)
        if "snapshot" not in argv or name != "snapshot-0-x":
            os.symlink("victim", "{ROOT}/" + name)
    print(subprocess.run(["sudo", "-n", "--", *argv], capture_output=True).returncode, *argv[:3])
"""
"""What root does for the drivers' user, when that has put links in the place of all that it is told of."""


@pytest.mark.fault(
    32, "no link in a root of shares leads root to another subvolume, to remove, limit or copy it"
)
def test_root_follows_no_link_that_the_drivers_user_has_made(btrfs: Path, tmp_path: Path) -> None:
    made = btrfs / tmp_path.name
    made.mkdir()
    subprocess.run(["btrfs", "-q", "subvolume", "create", str(made / "victim")], check=True)
    (made / "victim/file").write_text("precious")
    user = Unprivileged(made, tmp_path)
    user.allow(rule(USER))
    said = user.runs(FOLLOWED).splitlines()
    assert len(said) == 8 and (made / "victim/file").read_text() == "precious", said
    assert os.listdir(made / "victim") == ["file"] and os.stat(made / "victim").st_uid == 0
    limit = ["btrfs", "qgroup", "show", "--raw", "-re", "-F", str(made / "victim")]
    assert (
        " none " in subprocess.run(limit, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    )
    assert [
        name for name in os.listdir(made) if name.startswith("snapshot-") and not (made / name).is_symlink()
    ] == []
    subprocess.run(["btrfs", "-q", "subvolume", "delete", str(made / "victim")], check=True)
