# SPDX-License-Identifier: Apache-2.0
"""Where driver scripts run: in a lab of nodes, or from a directory tree of recorders."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Protocol, Sequence

from .drivers import Done, Step


class Node(Protocol):
    """The part of a lab node that is used here."""

    @property
    def pid(self) -> int:
        """The first process of it."""

    def run(
        self,
        argv: Sequence[str],
        user: str = ...,
        input: bytes = ...,
        *,
        cwd: str = ...,
        check: bool = ...,
        timeout: float | None = ...,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command inside the node."""

    def path(self, path: str) -> Path:
        """Return a path of the node as seen from outside."""


def stream_script(steps: Sequence[Step]) -> str:
    """Write what one_vmm_exec types into its ssh stream; the first failing command ends it."""
    lines = []
    for step in steps:
        # The real driver quotes with plain apostrophes; values with apostrophes do not occur.
        command = " ".join([step.argv[0], *(f"'{word}'" for word in step.argv[1:])])
        into = f" >{shlex.quote(step.into)}" if step.into else ""
        lines.append(f"(cat << 'EOT' | {command}{into}); rc=$?; [ $rc -eq 0 ] || exit $rc")
        lines.append(f"{step.stdin}\nEOT")
    return "\n".join(lines) + "\n"


def _done(result: subprocess.CompletedProcess[bytes]) -> Done:
    out, err = result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")
    return Done(result.returncode, out, err)


@dataclass
class LabRunner:
    """Run on the front-end of a lab as oneadmin, and on hosts by its ssh."""

    front_end: Node
    environment: Mapping[str, str]
    timeout: float = 900.0

    def write(self, path: str, text: str) -> None:
        """Write a front-end file, owned by oneadmin."""
        target = self.front_end.path(path)
        owner = os.stat(self.front_end.path("/var/lib/one"))
        missing = [p for p in [target.parent, *target.parent.parents] if not p.exists()]
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)
            os.chown(directory, owner.st_uid, owner.st_gid)
        target.write_text(text)
        os.chown(target, owner.st_uid, owner.st_gid)

    def read(self, path: str) -> str:
        """Read a front-end file."""
        return self.front_end.path(path).read_text()

    def exists(self, path: str) -> bool:
        """Tell whether a front-end file exists."""
        return self.front_end.path(path).exists()

    def local(self, argv: Sequence[str], stdin: Optional[str], environment: Dict[str, str]) -> Done:
        """Run a script as one_tm and one_datastore do: bare environment, nice 19, in /var/lib/one."""
        return self._run([*_bare(environment), *argv], stdin or "")

    def remote(self, host: str, steps: Sequence[Step]) -> Done:
        """Type the commands into one `ssh host bash -s`."""
        done = self._run([*_bare(self.environment), "ssh", host, "bash", "-s"], stream_script(steps))
        # The stream reports the exit code as a plain line, which ends up in the error text (recorded).
        done.stderr += (
            "\n" if done.stderr and not done.stderr.endswith("\n") else ""
        ) + f"ExitCode: {done.rc}\n"
        return done

    def _run(self, argv: List[str], stdin: str) -> Done:
        try:
            return _done(
                self.front_end.run(
                    argv,
                    user="oneadmin",
                    input=stdin.encode(),
                    cwd="/var/lib/one",
                    check=False,
                    timeout=self.timeout,
                )
            )
        except subprocess.TimeoutExpired:
            return Done(255, "", f"Timeout executing {' '.join(argv[-4:])}\n")


def _bare(environment: Mapping[str, str]) -> List[str]:
    pairs = [f"{name}={value}" for name, value in environment.items()]
    return ["env", "-i", *pairs, "nice", "-n", environment.get("PRIORITY", "19")]


@dataclass
class TreeRunner:
    """Run scripts below a directory: `<root>/<node>/var/...` stands for each node's file system.

    `through`: what runs a script, by its real path, if that is not to start by itself.
    """

    root: Path
    front_end: str = "fe"
    extra: Optional[Dict[str, str]] = None
    through: Sequence[str] = ()

    def path(self, node: str, path: str) -> Path:
        """Return where a node's path lies in the tree."""
        return self.root / node / path.lstrip("/")

    def write(self, path: str, text: str) -> None:
        """Write a front-end file."""
        self._store(self.front_end, path, text)

    def read(self, path: str) -> str:
        """Read a front-end file."""
        return self.path(self.front_end, path).read_text()

    def exists(self, path: str) -> bool:
        """Tell whether a front-end file exists."""
        return self.path(self.front_end, path).exists()

    def local(self, argv: Sequence[str], stdin: Optional[str], environment: Dict[str, str]) -> Done:
        """Run a recorder of the front-end."""
        return self._run(self.front_end, argv, stdin or "", environment)

    def remote(self, host: str, steps: Sequence[Step]) -> Done:
        """Run a host's steps; mkdir and cat act on the tree."""
        done = Done(0)
        for step in steps:
            if step.into:
                self._store(host, step.into, step.stdin + "\n")
            elif step.argv[0] == "/bin/mkdir":
                self.path(host, step.argv[-1]).mkdir(parents=True, exist_ok=True)
            else:
                done = self._run(host, step.argv, step.stdin + "\n", {"PATH": os.environ["PATH"]})
                done.stderr += f"ExitCode: {done.rc}\n"
            if done.rc:
                break
        return done

    def _store(self, node: str, path: str, text: str) -> None:
        target = self.path(node, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def _run(self, node: str, argv: Sequence[str], stdin: str, environment: Mapping[str, str]) -> Done:
        script = self.path(node, argv[0])
        home = self.path(node, "/var/lib/one")
        home.mkdir(parents=True, exist_ok=True)
        result = subprocess.run(
            [*self.through, str(script.resolve() if self.through else script), *argv[1:]],
            input=stdin.encode(),
            capture_output=True,
            cwd=home,
            env={**environment, "RECORDER_NODE": node, **(self.extra or {})},
            check=False,
        )
        return _done(result)
