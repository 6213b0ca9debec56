# SPDX-License-Identifier: Apache-2.0
"""What changed in a disk that no guest has open: QEMU's storage daemon copies it by a bitmap.

The disk is opened to be read only. A daemon that dies leaves it, and its bitmaps, as they are; one that could
write would have marked them as in use, which QEMU takes for of no use.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager, suppress
from typing import IO, Any, Callable, Iterator, Sequence

from ..errors import NoSpace, ToolFailed, ToolTimeout
from . import progress, run

PROGRAM = ["qemu-storage-daemon", "--chardev", "stdio,id=monitor", "--monitor", "chardev=monitor"]
LOOK_S = 0.1
LONGEST = 16 << 20
"""Bytes of one answer: a node has a few hundred."""
Ask = Callable[..., Any]


@contextmanager
def _started(within: Sequence[str]) -> Iterator[Ask]:
    """Start the daemon; yield what has it carry out a command of QMP with its arguments."""
    with run.memory() as err:
        process, to, answers = run.start_filter([*within, *PROGRAM], err)
        with to, answers:
            left = bytearray()

            def ask(command: str, **arguments: Any) -> Any:
                named = {name.replace("_", "-"): value for name, value in arguments.items()}
                line = json.dumps({"execute": command, "arguments": named}).encode() + b"\n"
                with suppress(BrokenPipeError):  # it has ended, which reading says, and why
                    os.write(to.fileno(), line)
                while True:
                    said = json.loads(_line(answers, left, command, err))
                    if "error" in said:
                        text = f"{PROGRAM[0]} {command} on {os.uname().nodename}: {said['error'].get('desc')}"
                        raise NoSpace(text) if "No space left" in text else ToolFailed(text)
                    if "return" in said:
                        return said["return"]

            try:
                _line(answers, left, "greeting", err)
                ask("qmp_capabilities")
                yield ask
                ask("quit")
            finally:
                process.kill()
                process.wait()


def _line(answers: IO[bytes], left: bytearray, about: str, err: int) -> bytes:
    """Return the daemon's next line; raise ToolFailed or ToolTimeout."""
    deadline = time.monotonic() + run.QUICK_S
    while b"\n" not in left:
        if not run.wait_to_read(answers.fileno(), deadline - time.monotonic()):
            raise ToolTimeout(f"{PROGRAM[0]} {about}: no answer within {run.QUICK_S} s")
        data = os.read(answers.fileno(), 1 << 16)
        if not data or len(left) > LONGEST:
            why = run.read_ends(err).decode("utf-8", "replace").strip()
            raise ToolFailed(f"{PROGRAM[0]} {about} on {os.uname().nodename}: it ended: {why}")
        left += data
    line, _, rest = bytes(left).partition(b"\n")
    left[:] = rest
    return line


def copy_changed(source: str, bitmap: str, target: str, within: Sequence[str] = (), *, rate: int = 0) -> None:
    """Write to the empty qcow2 `target`, of the disk's size, the clusters that a bitmap has.

    `source`: the active qcow2 layer, a path or a `json:` name; what the bitmap has in any layer is copied.
    `within`: words of programs that start the daemon; `rate`: bytes per second, 0 for no limit.
    """
    node = json.loads(source[5:]) if source.startswith("json:") else _file(source)
    with _started(within) as ask:
        ask("blockdev-add", node_name="disk", read_only=True, **node)
        ask("blockdev-add", node_name="copy", **_file(target))
        nodes = ask("query-named-block-nodes", flat=True)
        having = [
            one["node-name"]
            for one in nodes
            if bitmap in (known.get("name") for known in one.get("dirty-bitmaps", ()))
        ]
        if not having:
            raise ToolFailed(f"{PROGRAM[0]} on {os.uname().nodename} finds no bitmap {bitmap} in {source}")
        ask("block-dirty-bitmap-add", node="disk", name="changed", disabled=True)
        merged = [{"node": name, "name": bitmap} for name in having]
        ask("block-dirty-bitmap-merge", node="disk", target="changed", bitmaps=merged)
        how = {"sync": "bitmap", "bitmap": "changed", "bitmap_mode": "never"}
        ask(
            "blockdev-backup",
            job_id="copy",
            device="disk",
            target="copy",
            speed=rate,
            **how,
            auto_dismiss=False,
        )
        _wait(ask, target)


def _file(path: str) -> dict[str, Any]:
    return {"driver": "qcow2", "file": {"driver": "file", "filename": path}}


def _wait(ask: Ask, target: str) -> None:
    while True:
        (job,) = ask("query-jobs")
        progress.reached(int(job.get("current-progress", 0)), int(job.get("total-progress", 0)))
        if job["status"] == "concluded":
            break
        time.sleep(LOOK_S)
    if job.get("error"):
        text = f"backup to {target} on {os.uname().nodename}: {job['error']}"
        raise NoSpace(text) if "No space left" in text else ToolFailed(text)
    ask("job-dismiss", id="copy")
