# SPDX-License-Identifier: Apache-2.0
"""A call to a store that may hang: the caller waits for a limited time, then abandons the thread.

A thread in a system call that SIGKILL does not end keeps its process's files open, and their readers waiting:
oned, through ssh. Where that matters, a child process makes the call, and is abandoned.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Callable, List, NoReturn, TypeVar

from ..errors import ToolFailed

Answer = TypeVar("Answer")
LIMIT_S = 10.0
"""Seconds; a mounted store answers at once, or never if its server is away."""


def unless_it_hangs(look: Callable[[], Answer], otherwise: Answer, limit_s: float = LIMIT_S) -> Answer:
    """Return or raise what `look` does; return `otherwise` if it takes more than `limit_s` seconds."""
    found: List[Answer] = []
    failed: List[BaseException] = []

    def run() -> None:
        try:
            found.append(look())
        except BaseException as e:  # noqa: BLE001 - raised again in the caller
            failed.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise failed[0]
    return found[0] if found else otherwise


def unless_its_process_hangs(look: Callable[[], Answer], otherwise: Answer, limit_s: float) -> Answer:
    """As unless_it_hangs, by a child process; for a process without threads.

    The result of `look`, or its error, is pickled. Raise ToolFailed if the child is killed.
    """
    import pickle
    import select
    import signal

    ours, its = os.pipe()
    pid = os.fork()
    if not pid:
        _answer(look, its)
    os.close(its)
    said, until = b"", time.monotonic() + limit_s
    with open(ours, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(until - time.monotonic(), 0.0))[0]:
            part = pipe.read(1 << 16)
            if not part:
                os.waitpid(pid, 0)
                if not said:
                    raise ToolFailed(f"who was to look at a store on {os.uname().nodename} was ended")
                is_well, answer = pickle.loads(said)
                if is_well:
                    return answer  # type: ignore[no-any-return]
                raise answer
            said += part
    os.kill(pid, signal.SIGKILL)
    return otherwise


def _answer(look: Callable[[], Answer], pipe: int) -> NoReturn:
    """Run `look` in the child, with every file closed but the pipe for the answer."""
    import pickle

    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd != pipe:
                try:
                    os.close(fd)
                except OSError:
                    pass  # the descriptor of this listing
        try:
            answer = pickle.dumps((True, look()))
        except Exception as e:  # noqa: BLE001 - raised again in the caller
            answer = pickle.dumps((False, e))
        with open(pipe, "wb") as file:
            file.write(answer)
    finally:
        os._exit(0)
