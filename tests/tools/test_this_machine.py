# SPDX-License-Identifier: Apache-2.0
"""Which names are this machine's, in a network of its own with names of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Tuple

import pytest

NAMES = """\
127.0.0.1 localhost
127.0.1.1 x9.sitea.example
10.9.0.1 one-storage.example X9-Alias
10.9.0.2 x9.siteb.example x9b h1 h1.storage.example
10.9.0.3 h1.siteb.example
fd09::1 six.example
fd09::2 other-six.example
fd09::2 bridged.example
10.9.0.1 bridged.example
fd09::3 too.example
10.9.0.1 too.example
"""
ASK = """
import sys
from semishared.tools.this_machine import are_one, is_here
print(*(int(are_one(*name.split("=")) if "=" in name else is_here(name)) for name in sys.argv[1:]))
"""
OURS = (
    "x9",
    "X9",
    "localhost",
    "LOCALHOST",
    "x9.sitea.example",
    "one-storage.example",
    "x9-alias",
    "10.9.0.1",
    "127.0.0.1",
    "fd09::1",
    "six.example",
)
OTHERS = (
    "x9.siteb.example",
    "x9b",
    "x",
    "x9.",
    "x9.sitec.example",
    "h1",
    "10.9.0.2",
    "fd09::2",
    "other-six.example",
    "bridged.example",
    "too.example",
    "",
    "0",
    "a" * 300,
    "\u00e9",
)
ONE = (
    "h1=H1",
    "h1=h1.storage.example",
    "h1.storage.example=x9.siteb.example",
    "h1=10.9.0.2",
    "nowhere.example=Nowhere.example",
    "x9=localhost",
    "x9=one-storage.example",
    "10.9.0.1=fd09::1",
    "six.example=X9-Alias",
    "bridged.example=other-six.example",
)
TWO = (
    "h1=h1.siteb.example",
    "h1=h",
    "h1=x9",
    "x9=x9.siteb.example",
    "localhost=h1",
    "nowhere.example=nowhere",
    "h1=nowhere.example",
    "fd09::2=10.9.0.2",
    "h1=",
    "bridged.example=too.example",
    "bridged.example=x9",
)


def namespace(folder: Path) -> Tuple[List[str], Dict[str, str]]:
    """Return the words before a program that runs it on a machine called x9, with these names and addresses,
    and its environment.
    """
    hosts, resolv = folder / "hosts", folder / "resolv.conf"
    hosts.write_text(NAMES)
    resolv.write_text("")
    script = f"""
        mount --bind {hosts} /etc/hosts; mount --bind {resolv} /etc/resolv.conf; hostname x9
        ip link set lo up; ip link add v0 type veth peer v1; ip link set v0 up; ip link set v1 up
        ip addr add 10.9.0.1/24 dev v0; ip -6 addr add fd09::1/64 dev v0 nodad
        exec "$@"
    """
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": ":".join(sys.path)}
    return ["unshare", "--net", "--uts", "--mount", "sh", "-euc", script, "sh"], env


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """Return what a machine called x9 says of all these names."""
    asked = (*OURS, *OTHERS, *ONE, *TWO)
    words, env = namespace(tmp_path_factory.mktemp("names"))
    done = subprocess.run(
        [*words, sys.executable, "-c", ASK, *asked], env=env, capture_output=True, check=True, timeout=60
    )
    return dict(zip(asked, (word == b"1" for word in done.stdout.split())))


@pytest.mark.fault(
    31, "a machine's own are its names, its addresses and HOSTNAME of oned.conf, whatever leads there"
)
@pytest.mark.parametrize("name", OURS)
def test_its_name_and_all_that_lead_to_it_are_its_own(told: dict[str, bool], name: str) -> None:
    assert told[name]


@pytest.mark.fault(31, "a host whose name begins like the front-end's is another machine")
@pytest.mark.parametrize("name", OTHERS)
def test_a_name_that_begins_alike_is_another_machine(told: dict[str, bool], name: str) -> None:
    assert not told[name]


@pytest.mark.fault(
    31,
    "two names are one machine's if they lead to one address, or are the same full name, and not "
    "for how they begin",
)
@pytest.mark.parametrize("names", [*ONE, *TWO])
def test_two_names_are_one_machine_if_they_lead_to_one(told: dict[str, bool], names: str) -> None:
    assert told[names] is (names in ONE)
