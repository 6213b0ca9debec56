# SPDX-License-Identifier: Apache-2.0
"""A program between two ends of this process: fed and read in turn, so that neither pipe blocks the other."""

from __future__ import annotations

import os
from typing import IO, Callable, Generator

from ..errors import ToolTimeout
from . import run

CHUNK = 1 << 20
ENDS_S = 60.0


def through(
    argv: list[str], read: Callable[[], bytes], *, silence_s: float = run.SILENT_S
) -> Generator[bytes, None, None]:
    """Feed `argv` what `read` returns, until that is nothing, and yield its stdout in chunks.

    Raise as `run.run`, or ToolTimeout if it neither takes nor gives anything for `silence_s` seconds.
    """
    with run.memory() as err:
        process, into, out = run.start_filter(argv, err)
        os.set_blocking(into.fileno(), False)
        waiting, fed = b"", False
        try:
            while True:
                if not waiting and not fed:
                    waiting = read()
                    if not waiting:
                        into.close()
                        fed = True
                gives, takes = run.wait_to_read_or_write(
                    out.fileno(), into.fileno() if waiting else run.NONE, silence_s
                )
                if not gives and not takes:
                    raise ToolTimeout(f"{argv[0]} has done nothing for {silence_s:.0f} s")
                if takes:
                    try:
                        waiting = waiting[os.write(into.fileno(), waiting) :]
                    except BlockingIOError:
                        pass
                    except BrokenPipeError:
                        # It has ended, and its exit code says why.
                        waiting, fed = b"", True
                if gives:
                    chunk = os.read(out.fileno(), CHUNK)
                    if not chunk:
                        break
                    yield chunk
            # zstd that has failed waits until its input ends.
            _close(into)
            code = run.end_of(process, ENDS_S)
            if code is None:
                raise ToolTimeout(f"{argv[0]} has not ended {ENDS_S:.0f} s after its output")
        except BaseException:
            run.end_of(process, 0.0)
            raise
        finally:
            _close(into)
            _close(out)
        if code:
            raise run.failure(argv, code, run.read_ends(err))


def _close(file: IO[bytes]) -> None:
    try:
        file.close()
    except OSError:
        pass
