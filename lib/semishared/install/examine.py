# SPDX-License-Identifier: Apache-2.0
"""Have a machine examined over ssh by preflight.py, whatever it has of ours."""

from __future__ import annotations

import json
import os
from typing import Any, Sequence

from ..errors import FalseAnswer, HostUnreachable, SemisharedError, ToolMissing, ToolTimeout
from ..model import shapes
from ..tools.run import stream
from ..tools.this_machine import is_here
from ..wire.session import PYTHON

IMPORTS = {
    b"from ..tools.key import compared\n": "key.py",
    b"from ..tools.signatures import STAGED, boot, sign\n": "signatures.py",
}
SILENT_S = 45
"""More than all limits of preflight.py together."""
LONGEST = 4 << 20
"""Bytes of an answer, with what a login shell says before it."""


def program() -> bytes:
    """Return preflight.py with the modules that it imports in the place of the imports: one program, which
    needs nothing of ours.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with open(f"{package}/install/preflight.py", "rb") as file:
        text = file.read()
    for line, name in IMPORTS.items():
        with open(f"{package}/tools/{name}", "rb") as file:
            text = text.replace(line, file.read().replace(b"from __future__ import annotations\n", b""))
    return text


def examine(host: str, question: str, connect_s: int = 10, user: Sequence[str] = ()) -> dict[str, Any]:
    """Return what `host` answers to an encoded question; raise HostUnreachable, ToolMissing, FalseAnswer.

    `user` is the command that changes to the user who has the ssh keys.
    """
    argv = [*user, PYTHON, "-I", "-", question]
    if not is_here(host):
        options = [
            "-T",
            "-o",
            "BatchMode=yes",
            "-o",
            f"ConnectTimeout={connect_s}",
            "-o",
            "ServerAliveInterval=5",
        ]
        argv = [*user, "ssh", *options, "--", host, f"exec {PYTHON} -I - {question}"]
    said = bytearray()
    try:
        for chunk in stream(argv, stdin=program(), silence_s=SILENT_S):
            said += chunk
            if len(said) > LONGEST:
                raise FalseAnswer(f"{host} says more of itself than {LONGEST >> 20} MiB")
    except FalseAnswer:
        raise
    except ToolTimeout:
        raise HostUnreachable(f"{host} did not answer within {SILENT_S} s") from None
    except SemisharedError as e:
        if "exit code 127" in e.detail:
            raise ToolMissing(f"{PYTHON} is not installed on {host}") from None
        raise HostUnreachable(f"{host}: {e.detail}") from None
    try:
        answer = json.loads(said.splitlines()[-1])
    except (ValueError, LookupError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise HostUnreachable(f"{host}: its answer makes no sense (does its shell print something at login?)")
    found = shapes.wrong(answer, shapes.ANSWER)
    if found is not None:
        raise FalseAnswer(f"{host} has said {found}")
    return answer
