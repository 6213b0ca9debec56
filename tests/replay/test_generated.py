# SPDX-License-Identifier: Apache-2.0
"""The simulated oned must generate what a real one was recorded to generate."""

from __future__ import annotations

import copy
import difflib
import functools
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

import traces
from replay import catalog
from replay.compare import EXCLUDED, MEASURED, UNRECORDED, Bijection, decode, differences
from replay.generate import Outcome, generate, plain_message

SCENARIOS = catalog.scenarios()
MATCHED = [name for name, status in SCENARIOS.items() if status.status == catalog.PASS]


@functools.cache
def outcomes(name: str) -> List[Outcome]:
    """Generate a scenario once; the comparison alone is cheap."""
    with tempfile.TemporaryDirectory(prefix="replay-") as root:
        return generate(traces.load(name), Path(root))


def compare(recording: traces.Recording, generated: List[Outcome]) -> List[str]:
    """List every difference between a recording and what was generated."""
    mapping = Bijection()
    # One sequence for the whole recording: calls that oned makes in the background were noted with
    # whatever command came next.
    recorded = [
        (f"step {n} `{step['cmd']}`", call)
        for n, step in enumerate(recording["steps"], 1)
        for call in step["calls"]
    ]
    made = [call for outcome in generated for call in outcome.calls]
    kinds = {f"{call['kind']}/{call['action']}" for _, call in recorded}
    absent = set(UNRECORDED) - kinds
    made = [call for call in made if f"{call['kind']}/{call['action']}" not in absent]
    found = _sequence([call for _, call in recorded], made)
    if found:
        return found
    for (where, call), other in zip(recorded, made):
        found += _call(f"{where} {call['kind']}/{call['action']}", recording, call, other, mapping)
    for number, (step, outcome) in enumerate(zip(recording["steps"], generated), 1):
        where = f"step {number} `{step['cmd']}`"
        if step["rc"] != outcome.rc:
            found.append(f"{where}: exit code recorded {step['rc']}, generated {outcome.rc} {outcome.output}")
        if not mapping.same(plain_message(step["output"]), plain_message(outcome.output)):
            found.append(f"{where}: output recorded {step['output']!r}, generated {outcome.output!r}")
        for path, key in step["files"].items():
            texts = traces.body(recording, key), outcome.files[path]
            found += differences(f"{where} file {path}", *texts, mapping)
        for key, value in step["info_after"].items():
            found += differences(
                f"{where} after {key}", traces.body(recording, value), outcome.info[key], mapping
            )
        if step["vm_states_after"] != outcome.states:
            found.append(f"{where}: states recorded {step['vm_states_after']}, generated {outcome.states}")
    return found


def _sequence(recorded: List[Dict[str, Any]], made: List[Dict[str, Any]]) -> List[str]:
    left = [f"{call['host']} {call['kind']}/{call['driver']}/{call['action']}" for call in recorded]
    right = [f"{call['host']} {call['kind']}/{call['driver']}/{call['action']}" for call in made]
    return [line for line in difflib.unified_diff(left, right, "recorded", "generated", lineterm="", n=2)]


def _call(where: str, recording: traces.Recording, call: Any, made: Any, mapping: Bijection) -> List[str]:
    found = []
    if len(call["argv"]) != len(made["argv"]):
        found.append(f"{where}: argv recorded {call['argv']}, generated {made['argv']}")
    for index, (word, other) in enumerate(zip(call["argv"], made["argv"])):
        if word.startswith("@base64:"):
            texts = traces.body(recording, word[len("@base64:") :]), decode(other)
            found += differences(f"{where} argv[{index}]", *texts, mapping)
        elif not mapping.same(word, other):
            found.append(f"{where}: argv[{index}] recorded {word!r}, generated {other!r}")
    stdin = made["stdin"]
    if call.get("stdin_encoding") == "base64":
        stdin = decode(stdin)
    found += differences(f"{where} stdin", traces.body(recording, call.get("stdin") or ""), stdin, mapping)
    if call.get("vm_info"):
        found += differences(
            f"{where} one.vm.info", traces.body(recording, call["vm_info"]), made["vm_info"], mapping
        )
    for name in ("env", "cwd", "script"):
        # Of hypervisor calls only the directory was recorded, and that on the host is the ssh login's own.
        if name in call and call["kind"] != "vmm" and call[name] != made[name]:
            found.append(f"{where}: {name} recorded {call[name]!r}, generated {made[name]!r}")
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_recording(name: str) -> None:
    status = SCENARIOS[name]
    if status.status != catalog.PASS:
        pytest.skip(f"not yet: {status.reason}")
    found = compare(traces.load(name), outcomes(name))
    assert not found, f"{len(found)} differences\n" + "\n".join(found[:40])


def test_every_recording_is_classified() -> None:
    assert set(SCENARIOS) == set(traces.names())
    required = {"01", "02", "03", "04", "05", "05b", "06", "07", "08", "09", "10", "11", "12", "15", "16"}
    assert {name.split("-")[0] for name in MATCHED} >= required
    assert all(status.reason for status in SCENARIOS.values() if status.status != catalog.PASS)


def test_every_left_out_field_has_a_reason() -> None:
    assert all(len(reason) > 10 for reason in [*EXCLUDED.values(), *MEASURED.values(), *UNRECORDED.values()])


def _bodies(old: str, new: str) -> Callable[[Any], None]:
    def change(recording: Any) -> None:
        step = recording["steps"][1]
        keys = {call["vm_info"] for call in step["calls"] if call.get("vm_info")}
        hit = [key for key in keys if old in recording["bodies"][key]]
        assert hit
        for key in hit:
            recording["bodies"][key] = recording["bodies"][key].replace(old, new, 1)

    return change


def _first_argument(recording: Any) -> None:
    recording["steps"][1]["calls"][0]["argv"][1] += "x"


def _swap(recording: Any) -> None:
    calls = recording["steps"][1]["calls"]
    calls[0], calls[1] = calls[1], calls[0]


def _drop(recording: Any) -> None:
    recording["steps"][2]["calls"].pop()


def _environment(recording: Any) -> None:
    recording["steps"][1]["calls"][0]["env"]["LC_ALL"] = "C"


def _stdin(recording: Any) -> None:
    call = next(call for call in recording["steps"][1]["calls"] if call["action"] == "deploy")
    recording["bodies"][call["stdin"]] = recording["bodies"][call["stdin"]].replace(
        "type='raw'", "type='qcow2'", 1
    )


def _source_of_another(recording: Any) -> None:
    """Let one call name the image of another disk: well formed, but not the same thing."""
    calls = recording["steps"][1]["calls"]
    calls[1]["argv"][0] = calls[0]["argv"][0]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_first_argument, id="argument"),
        pytest.param(_swap, id="order"),
        pytest.param(_drop, id="missing call"),
        pytest.param(_environment, id="environment"),
        pytest.param(_stdin, id="stdin"),
        pytest.param(_source_of_another, id="hash of another image"),
        pytest.param(_bodies("<SAVE><![CDATA[NO]]>", "<SAVE><![CDATA[YES]]>"), id="field"),
        pytest.param(
            _bodies("<PETIME>0</PETIME>", "<PETIME>1795171170</PETIME>"), id="moment instead of none"
        ),
        pytest.param(_bodies("<RESCHED>0</RESCHED>", ""), id="missing field"),
    ],
)
def test_the_comparison_finds(change: Callable[[Any], None]) -> None:
    recording = copy.deepcopy(traces.load("02-vm-boot-probe"))
    change(recording)
    assert compare(recording, outcomes("02-vm-boot-probe"))


def test_mapping_is_two_way() -> None:
    one, two = "a" * 32, "b" * 32
    mapping = Bijection()
    assert mapping.same(f"/d/{one}", f"/d/{two}")
    assert not mapping.same(f"/d/{one}", f"/d/{'c' * 32}")
    assert not mapping.same(f"/d/{'d' * 32}", f"/d/{two}")
