# SPDX-License-Identifier: Apache-2.0
"""The table of metrics, what is written by it, and what names metrics: alert rules, dashboard, page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Set, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.cli import metrics as command
from semishared.config import Config
from semishared.errors import BadArguments
from semishared.model.base.steps import HeldBase, KeptDisk, Listed, Reported, ReportedDisk, ReportedVm
from semishared.model.device.steps import PoolDevice
from semishared.opennebula.xml import Host
from semishared.plan.care import attention, metrics
from semishared.plan.care.metrics import BYTES, METRICS, SECONDS, Counted, Device, Facts, Machine

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "share/prometheus/semishared.rules.yml"
DASHBOARD = ROOT / "share/grafana/semishared.json"
PAGE = ROOT / "docs/how-to/metrics.md"
SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\})? (\S+)')
LABEL = re.compile(r'([a-z]+)="((?:[^"\\\n]|\\.)*)"')
PARTS = ("_bucket", "_sum", "_count")
OF_PROMETHEUS = {"instance", "job", "le"}

MACHINE = Machine(
    bases=2,
    base_bytes=10,
    leases=3,
    total=100,
    free=50,
    floor=5,
    disks={"overlay": (2, 7)},
    devices=[Device("/mnt/a", "fast", True, 100, 50, 1, 1), Device("/mnt/b", "slow", False, 0, 0, 0, 0)],
)
OK_CLONE = ("tm/clone", "overlay", "none", "ok")
FACTS = Facts(
    version="1.2",
    release="abc",
    now=1e9,
    seconds=0.5,
    actions={
        OK_CLONE: Counted().and_one(100, 0),
        ("tm/clone", "overlay", "store", "ok"): Counted()
        .and_one(70_000, 1 << 30)
        .and_one(2_000_000, 1 << 50),
        ("tm/clone", "none", "none", "SS010"): Counted().and_one(5, 0),
    },
    machines={"h1": MACHINE, "h2": None},
    jobs=[("h1", "stage"), ("h1", "stage")],
    findings=["broken"],
)


def samples(text: str) -> List[Tuple[str, Dict[str, str], str]]:
    """Return name, labels and value of each sample; every line has to be one, or a comment."""
    found = []
    for line in text.removesuffix("\n").split("\n"):
        if not line.startswith("# "):
            match = SAMPLE.fullmatch(line)
            assert match, line
            found.append((match[1], dict(LABEL.findall(match[2] or "")), match[3]))
    return found


def of(text: str, name: str) -> Dict[Tuple[str, ...], str]:
    """Return the values of a metric by the values of its labels."""
    return {tuple(labels.values()): value for found, labels, value in samples(text) if found == name}


def base_name(name: str) -> str:
    """Return the metric that a name in an expression is of."""
    for part in PARTS:
        if (
            name.endswith(part)
            and METRICS.get(name[: -len(part)], METRICS["semishared_bases"]).type == "histogram"
        ):
            return name[: -len(part)]
    return name


def test_each_metric_is_written_with_the_labels_of_the_table() -> None:
    text = metrics.text(FACTS)
    assert {base_name(name) for name, _, _ in samples(text)} == set(METRICS)
    for name, labels, _ in samples(text):
        wanted = METRICS[base_name(name)].labels
        assert tuple(labels) == ((*wanted, "le") if name.endswith("_bucket") else wanted)
    said = re.findall(r"(?m)^# TYPE (\S+) (\S+)$", text)
    assert said == [(metric.name, metric.type) for metric in METRICS.values()]
    assert len({line.rpartition(" ")[0] for line in text.splitlines() if line[0] != "#"}) == len(
        samples(text)
    )


def test_histograms_add_up() -> None:
    text = metrics.text(FACTS)
    long = {labels["le"]: value for name, labels, value in samples(text)
            if name == "semishared_action_seconds_bucket" and labels["source"] == "store"}  # fmt: skip
    assert long["60"] == "0" and long["300"] == "1" and long["1800"] == "1" and long["+Inf"] == "2"
    assert of(text, "semishared_action_seconds_sum")["tm/clone", "overlay", "store", "ok"] == "2070.0"
    assert of(text, "semishared_action_seconds_bucket")[(*OK_CLONE, "0.1")] == "1"  # at most, not below
    assert set(of(text, "semishared_action_bytes_count")) == {("tm/clone", "overlay", "store", "ok")}
    sizes = of(text, "semishared_action_bytes_bucket")
    assert sizes["tm/clone", "overlay", "store", "ok", str(1 << 30)] == "1"
    assert sizes["tm/clone", "overlay", "store", "ok", str(BYTES[-1])] == "1"


def test_a_hit_is_a_disk_over_a_base_for_which_nothing_had_to_come() -> None:
    assert of(metrics.text(FACTS), "semishared_base_uses_total") == {("hit",): "1", ("miss",): "2"}


def test_of_a_silent_machine_only_that_is_said() -> None:
    text = metrics.text(FACTS)
    assert of(text, "semishared_host_up") == {("h1",): "1", ("h2",): "0"}
    assert text.count('host="h2"') == 1


@given(host=st.text(min_size=1), path=st.text())
def test_hostile_names_stay_in_their_labels(host: str, path: str) -> None:
    device = Device(path, "any", True, 1, 1, 0, 0)
    text = metrics.text(FACTS._replace(machines={host: Machine(devices=[device, device])}))
    text.encode()
    back = {'\\"': '"', "\\n": "\n", "\\\\": "\\"}
    ((known,),) = of(text, "semishared_host_up")
    plain = host.encode("utf-8", "replace").decode()
    assert re.sub(r'\\["n\\]', lambda match: back[match[0]], known) == plain
    assert sum(line.startswith("semishared_device_up") for line in text.split("\n")) == 1


def test_the_number_of_series_is_bounded() -> None:
    """Of a cloud of 100 hosts with 8 devices each."""
    devices = [Device(f"/mnt/{n}", "fast", True, 100, 50, 1, 1) for n in range(8)]
    hosts: Any = {f"h{n}": MACHINE._replace(devices=devices) for n in range(100)}
    one = len(samples(metrics.text(FACTS._replace(machines={"h0": hosts["h0"]}, jobs=[]))))
    many = len(samples(metrics.text(FACTS._replace(machines=hosts, jobs=[]))))
    assert many - one == 99 * (26 + 5 * len(devices))
    key = len(samples(metrics.text(FACTS))) - len(samples(metrics.text(FACTS._replace(actions={}))))
    assert key <= 24 * len(FACTS.actions) and len(SECONDS) + len(BYTES) + 6 == 24
    assert (
        "26 for each host without a pool, 5 for each device, and 24 for each combination" in PAGE.read_text()
    )


# -- what machines say ------------------------------------------------------------------------------


def base(name: str, leases: Tuple[str, ...] = (), damaged: bool = False) -> HeldBase:
    return HeldBase(name, 10, 0, 0, leases, 10, damaged, "")


def said(*places: Tuple[int, Sequence[HeldBase]]) -> attention.Machine:
    """Return what a machine says of several places of datastores: free bytes and bases of each."""
    disk = ReportedDisk(0, "diff", "local", "qcow2", "/d", 5, 0, None, "normal", 3, "", None)
    beside = disk._replace(disk=1, how="in-place", place="shared", bytes=100, uncommitted=None)
    vms = [ReportedVm(1, 101, [disk, beside], ""), ReportedVm(2, 101, [], "unreadable")]
    kept = [KeptDisk("/k", 9, 0, None, 7, 8)]
    pool = PoolDevice("u", "/mnt/a", "fast", 1, 100, 40, 1, 1, 0, [], False, "read-only")
    return attention.Machine(
        "h1",
        [Reported(vms, kept, ["x"])] * len(places),
        [Listed(list(bases), 1000, free, 1000) for free, bases in places],
        [pool] * len(places),
    )


def test_what_a_machine_says_is_summed_up() -> None:
    host = Host.parse("<HOST><NAME>h1</NAME><TEMPLATE/></HOST>")
    two = said((500, [base("1-2-a", ("1-0", "2-0"))]), (20, [base("1-3-b", damaged=True)]))
    found = command.machine(host, two, Config())
    assert found[:7] == (4, 2, 20, 2, 1, 1000, 20) and found.floor == 50
    assert found.disks == {"diff": (2, 10), "in-place": (2, 0)}
    assert (found.uncommitted, found.kept, found.kept_bytes) == (6, 2, 14)
    assert [device.is_well for device in found.devices] == [False, False]


def test_a_floor_that_is_no_size_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    host = Host.parse("<HOST><NAME>h1</NAME><TEMPLATE/></HOST>")
    found = command.machine(host, said((500, [])), Config(bases_free_floor="much"))
    assert found.floor == -1 and "h1: free_floor = 'much'" in capsys.readouterr().err
    assert "floor_bytes{" not in metrics.text(FACTS._replace(machines={"h1": found}))


def test_of_one_that_has_not_answered_nothing_but_that_is_said() -> None:
    hosts = [Host.parse(f"<HOST><NAME>{name}</NAME><TEMPLATE/></HOST>") for name in ("h1", "h2")]
    found = command.machines(attention.Facts("fe", 0, str, hosts=hosts, machines=[said((500, []))]), Config())
    assert {name: machine is not None for name, machine in found.items()} == {
        "fe": False,
        "h1": True,
        "h2": False,
    }


@pytest.mark.parametrize("name", ["x.txt", "x", ".prom", "/d/.x.prom", ""])
def test_a_file_that_node_exporter_does_not_read_is_refused(name: str) -> None:
    with pytest.raises(BadArguments):
        command._checked(name)


# -- what names metrics -----------------------------------------------------------------------------


def expressions() -> Iterator[Tuple[str, str]]:
    """Yield where an expression is, and the expression."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield f"dashboard: {panel['title']}", target["expr"]
    for rule in re.split(r"(?m)^  - alert: ", RULES.read_text())[1:]:
        expr = re.search(r"(?s)expr: (.*?)\n    (?:for|labels|annotations):", rule)
        assert expr, rule
        yield f"alert: {rule.split()[0]}", expr[1]


def names_in(text: str) -> Set[str]:
    return set(re.findall(r"(?<![#\w])semishared_[a-z_]+", text))


@pytest.mark.reads_checkout
@pytest.mark.parametrize(("where", "expr"), expressions())
def test_rules_and_dashboard_name_what_is_written(where: str, expr: str) -> None:
    names = {base_name(name) for name in names_in(expr)}
    assert names and names <= set(METRICS), where
    known = OF_PROMETHEUS.union(*(METRICS[name].labels for name in names))
    grouped = {word for group in re.findall(r"\bby \(([^)]*)\)", expr) for word in group.split(", ")}
    selected = {
        label for part in re.findall(r"\{([^}]*)\}", expr) for label in re.findall(r"([a-z_]+)[=!]", part)
    }
    assert grouped | selected <= known, where
    for name in names_in(expr):
        is_histogram = METRICS[base_name(name)].type == "histogram"
        assert is_histogram == (name != base_name(name)), f"{where}: {name} is no series"


@pytest.mark.reads_checkout
def test_texts_of_alerts_and_legends_name_labels_that_are_there() -> None:
    labels = OF_PROMETHEUS.union(*(metric.labels for metric in METRICS.values()))
    assert set(re.findall(r"\$labels\.([a-z_]+)", RULES.read_text())) <= labels
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            assert set(re.findall(r"\{\{([a-z_]+)\}\}", target["legendFormat"])) <= labels


@pytest.mark.reads_checkout
def test_each_metric_is_on_the_dashboard_and_each_on_the_page() -> None:
    shown = {
        base_name(name) for where, expr in expressions() if "dashboard" in where for name in names_in(expr)
    }
    assert set(METRICS) - shown == set()
    rows = re.findall(r"(?m)^\| `(semishared_\w+)` \| (\w+) \| ([^|]*) \|", PAGE.read_text())
    assert [(name, kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows] == [
        (metric.name, metric.type, list(metric.labels)) for metric in METRICS.values()
    ]
    assert {base_name(name) for name in names_in(PAGE.read_text())} == set(METRICS)


@pytest.mark.reads_checkout
def test_the_page_says_each_alert() -> None:
    alerts = re.findall(r"(?m)^  - alert: (\w+)$", RULES.read_text())
    assert re.findall(r"(?m)^\| `(Semishared\w+)` \|", PAGE.read_text()) == alerts


@pytest.mark.reads_checkout
def test_panels_do_not_lie_over_each_other() -> None:
    taken: Set[Tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
