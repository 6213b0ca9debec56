# SPDX-License-Identifier: Apache-2.0
"""When doctor warns of guests that have their host's CPU, by what hosts say of their processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from semishared.install import preflight
from semishared.model import shapes
from semishared.opennebula.xml import Host
from semishared.plan.care import diagnosis
from semishared.plan.care.checks import WARNING
from semishared.plan.care.diagnosis_machines import of_machines

INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 85
model name\t: Intel(R) Xeon(R) Gold 6130 CPU @ 2.10GHz
flags\t\t: fpu avx avx2 avx512f

processor\t: 1
vendor_id\t: Another
flags\t\t: none
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n"


@pytest.mark.parametrize(
    ("text", "kind", "name", "has"),
    [
        (INTEL, "GenuineIntel 6 85", "Intel(R) Xeon(R) Gold 6130 CPU @ 2.10GHz", "avx avx2 avx512f fpu"),
        (ARM, "0x41 0x3 0xd0c", "0x41 0x3 0xd0c", "asimd fp"),
        ("", "", "", ""),
    ],
    ids=["Intel", "ARM", "nothing"],
)
def test_what_the_kernel_says_of_a_processor(
    tmp_path: Path, text: str, kind: str, name: str, has: str
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    found = preflight.processor(str(tmp_path / "cpuinfo"))
    assert (found["kind"], found["name"], " ".join(found["has"])) == (kind, name, has)
    assert shapes.wrong(found, shapes.LIBVIRT["processor?"]) is None


def host(name: str, cluster: int = 0) -> Host:
    return Host.parse(f"<HOST><NAME>{name}</NAME><CLUSTER_ID>{cluster}</CLUSTER_ID></HOST>")


def answer(kind: str, has: str, guests: int = 0, kernel: str = "6.1") -> dict[str, Any]:
    processor = {"kind": kind, "name": f"Processor {kind}", "has": has.split(), "kernel": kernel}
    return {"libvirt": {"processor": processor, "passed_through": guests}}


def said(clusters: dict[str, int], **answers: dict[str, Any]) -> list[str]:
    cloud = diagnosis.Cloud(hosts=[host(name, cluster) for name, cluster in clusters.items()])
    whole = {
        name: {
            "programs": {},
            "lacks": {"needed": [], "wanted": []},
            "python": [3, 11, 2],
            "user": "oneadmin",
            "tree": {"version": "1", "parts": {"lib/semishared": "a"}},
            **its,
        }
        for name, its in answers.items()
    }
    for its in whole.values():
        its["libvirt"] = {"libvirt": "9.0.0", "qemu": "7.2.0", "secrets": [], "user": "", **its["libvirt"]}
    found = of_machines(whole, diagnosis.Site("fe"), cloud, ("", ""))
    mine = [one for one in found if "host-passthrough" in one.what]
    assert all(one.severity == WARNING for one in mine)
    return [one.what for one in mine]


TWO = {"a": 0, "b": 0}
OLD = ("v 6 85", "avx avx2")


@pytest.mark.fault(88, "doctor names hosts whose processors differ, if guests have their host's CPU there")
def test_processors_that_differ_are_named_where_guests_have_them() -> None:
    (text,) = said(TWO, a=answer(*OLD, guests=2), b=answer("v 6 106", "avx avx2"))
    assert "2 guests on a have their host's CPU" in text
    assert "Processor v 6 85 on a; Processor v 6 106 on b" in text
    (text,) = said(TWO, a=answer(*OLD), b=answer("v 6 85", "avx", 1))
    assert "1 guest on b " in text and "on a; Processor v 6 85 without avx2 on b" in text
    (text,) = said(TWO, a=answer("k", " ".join("abcdefgh")), b=answer("k", "a", 1))
    assert "without b c d e f g ... on b" in text


@pytest.mark.parametrize(
    ("clusters", "answers"),
    [
        (TWO, {"a": answer(*OLD), "b": answer("other", "")}),
        (TWO, {"a": answer(*OLD, guests=1), "b": answer(*OLD, guests=1)}),
        ({"a": 0, "b": 1}, {"a": answer(*OLD, guests=1), "b": answer("other", "")}),
        (TWO, {"a": answer(*OLD, guests=1), "b": answer("v 6 85", "avx", kernel="6.12")}),
        (TWO, {"a": answer(*OLD, guests=1), "b": {"libvirt": {}}}),
    ],
    ids=["no such guest", "alike", "two clusters", "two kernels", "an older answer"],
)
def test_nothing_is_said(clusters: dict[str, int], answers: dict[str, dict[str, Any]]) -> None:
    assert said(clusters, **answers) == []
