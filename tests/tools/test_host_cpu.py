# SPDX-License-Identifier: Apache-2.0
"""A machine's own processor, and guests that have it, as the kernel says them (install/preflight.py)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from semishared.install import preflight


def test_this_machine_has_a_processor() -> None:
    found = preflight.processor()
    assert found["kind"] and found["name"] and found["has"] and found["kernel"] == os.uname().release


@pytest.mark.fault(88, "a guest that has its host's CPU is counted where it runs")
@pytest.mark.parametrize(
    ("words", "counts"),
    [
        (["qemu-system-x86_64", "-cpu", "host,migratable=on"], 1),
        (["/usr/libexec/qemu-kvm", "-name", "guest=one-1", "-cpu", "host"], 1),
        (["qemu-system-x86_64", "-cpu", "hostile"], 0),
        (["qemu-system-x86_64", "-cpu", "EPYC", "-name", "host"], 0),
        (["qemu-system-x86_64", "-cpu"], 0),
        (["grep", "-cpu", "host"], 0),
    ],
)
def test_guests_that_have_their_hosts_cpu(words: list[str], counts: int) -> None:
    before = preflight.passed_through()
    program = "import sys; sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"
    argv = [words[0], "-I", "-c", program, *words[1:]]
    with subprocess.Popen(
        argv, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as guest:
        assert guest.stdout and guest.stdout.read(1) == b"x"
        try:
            assert preflight.passed_through() - before == counts
        finally:
            guest.communicate()
