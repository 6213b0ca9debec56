# SPDX-License-Identifier: Apache-2.0
"""Have a machine examined over ssh by preflight.py, whatever it has of ours.

And name the programs that must be there before any change.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Mapping, Sequence

from ..errors import FalseAnswer, HostUnreachable, SemisharedError, ToolMissing, ToolTimeout
from ..model import platforms, shapes
from ..named import NamedTuple
from ..tools.run import stream
from ..tools.this_machine import is_here
from ..wire.session import PYTHON, ssh_to
from . import preflight

IMPORTS = {
    b"from ..tools.key import compared\n": "key.py",
    b"from ..tools.os_release import release\n": "os_release.py",
    b"from ..tools.signatures import STAGED, boot, sign\n": "signatures.py",
}
SILENT_S = 45
"""Seconds: more than all limits of preflight.py together."""
LONGEST = 4 << 20
"""Bytes of an answer, with a login shell's output before it."""


OLD = """
import json, pwd, subprocess, sys
if newest():
    words = [newest(), "-I", "-"] + sys.argv[1:]
    sys.exit(subprocess.run(words, input=NEW.encode()).returncode)
answer = {"programs": {}, "lacks": {"needed": [], "wanted": []}, "python": list(sys.version_info[:3])}
user = [row.pw_name for row in pwd.getpwall() if row.pw_uid == os.geteuid()] or [str(os.geteuid())]
answer.update(os=release(), user=user[0], boot="", up_s=0.0, ceph={})
print(json.dumps(answer))
"""
"""What a machine does whose Python is older: it asks a newer one beside it, or says no more than which
machine it is.
"""


def program() -> bytes:
    """Return one program that needs nothing of ours: preflight.py, and less for a Python that is too old."""
    old = _of_file("newer_python.py") + _of_file("tools/os_release.py") + OLD.encode()
    texts = ascii(_inlined().decode()), ascii(old.decode())
    # As texts: a Python that is too old does not even read the whole of preflight.py.
    run = f"exec(compile(NEW if sys.version_info >= {platforms.PYTHON_FLOOR} else OLD, '-', 'exec'))"
    return f"import sys\nNEW, OLD = {texts[0]}, {texts[1]}\n{run}\n".encode()


def _of_file(name: str) -> bytes:
    """Return a module of ours as a part of another one."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with open(f"{package}/{name}", "rb") as file:
        return file.read().replace(b"from __future__ import annotations\n", b"")


def _inlined() -> bytes:
    """Return preflight.py with its imported modules inlined."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with open(f"{package}/install/preflight.py", "rb") as file:
        text = file.read()
    for line, name in IMPORTS.items():
        text = text.replace(line, _of_file(f"tools/{name}"))
    return text


def examine(host: str, question: str, connect_s: int = 10, user: Sequence[str] = ()) -> dict[str, Any]:
    """Return a host's answer to an encoded question; raise HostUnreachable, ToolMissing, FalseAnswer.

    `user`: the command that changes to the user with the ssh keys.
    """
    argv = [*user, PYTHON, "-I", "-", question]
    if not is_here(host):
        argv = [*user, *ssh_to(connect_s), "--", host, f"exec {PYTHON} -I - {question}"]
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


# Programs that must be there before any change, on the front-end and on named hosts.


class Missing(NamedTuple):
    """Programs that a machine lacks: everything depends on `needed`, some features on `wanted`."""

    machine: str
    needed: tuple[str, ...]
    wanted: tuple[str, ...]
    mend: str = ""
    """What root does there."""

    def line(self) -> str:
        """Return it as one line, '' if nothing is missing."""
        parts = [f"{', '.join(self.needed)} missing"] if self.needed else []
        parts += [f"without {', '.join(self.wanted)} some things do not work"] if self.wanted else []
        parts += [f"as root there: {self.mend}"] if self.mend else []
        return f"{self.machine}: {'; '.join(parts)}" if parts else ""


def on_front_end() -> Missing:
    return lacking(os.uname().nodename, preflight.examine(preflight.Question(("front-end",))))


def on_hosts(hosts: Sequence[str], user: Sequence[str] = ()) -> list[Missing]:
    """Return what each host lacks, all asked at once; `user`: the command that changes to the keys' user."""

    def one(host: str) -> Missing:
        try:
            seen = examine(host, preflight.encoded(preflight.Question()), user=user)
        except SemisharedError as e:
            return Missing(host, (f"an answer ({e.detail})",), ())
        return lacking(host, seen)

    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(one, hosts))


def lacking(machine: str, seen: Mapping[str, Any]) -> Missing:
    """Return what an examined machine lacks."""
    lacks, platform = seen["lacks"], seen.get("os", {})
    if tuple(seen["python"]) < platforms.PYTHON_FLOOR:
        return Missing(machine, (f"{PYTHON} 3.9 or newer",), (), platforms.python(platform))
    programs = [*lacks["needed"], *lacks["wanted"]]
    mend = platforms.install(platform, programs) if programs else ""
    return Missing(machine, tuple(lacks["needed"]), tuple(lacks["wanted"]), mend)
