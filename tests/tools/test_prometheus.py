# SPDX-License-Identifier: Apache-2.0
"""Metrics on their whole way, with Debian's programs: promtool, node_exporter and Prometheus."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from semishared.plan.care import metrics
from semishared.plan.care.metrics import METRICS, Counted, Device, Facts, Machine
from tools.oned_site import ROOT

RULES = ROOT / "share/prometheus/semishared.rules.yml"
PAGE = ROOT / "docs/how-to/metrics.md"
DASHBOARD = ROOT / "share/grafana/semishared.json"
HOSTILE = 'h"1\\\n\udc80é\r{}'
FACTS = Facts(
    version="1.2",
    release="abc",
    now=1e9,
    seconds=0.5,
    actions={
        ("tm/clone", "overlay", "store", "ok"): Counted()
        .and_one(70_000, 1 << 30)
        .and_one(2_000_000, 1 << 50),
        ("tm/clone", "none", "none", "SS010"): Counted().and_one(5, 0),
    },
    machines={
        "h1": Machine(
            bases=2, total=100, free=50, floor=5, devices=[Device("/mnt/a", "fast", True, 9, 4, 1, 1)]
        ),
        "h2": None,
        HOSTILE: Machine(devices=[Device(HOSTILE, "any", True, 9, 4, 0, 0)] * 2),
    },
    jobs=[("h1", "stage")],
    findings=["broken"],
)


def promtool(*words: str, stdin: str = "") -> str:
    done = subprocess.run(
        ["promtool", *words], input=stdin, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_takes_the_metrics_without_a_complaint() -> None:
    assert promtool("check", "metrics", stdin=metrics.text(FACTS)) == ""


def test_promtool_takes_the_rules() -> None:
    assert "SUCCESS: 14 rules found" in promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))


# -- what raises each alert, and what does not ------------------------------------------------------

LONG = ("SemisharedUncommitted",)
OK_CLONE = 'action="tm/clone",place="overlay",source="none",outcome="ok"'
BUCKET = f'action_seconds_bucket{{{OK_CLONE},le="%s"}}'
FAILED = 'action="tm/clone",place="none",source="none",outcome="SS010"'
RAISED: Dict[str, Tuple[Dict[str, str], Dict[str, str]]] = {
    # alert -> series that raise it, and series that do not; values are those of each interval
    "SemisharedMetricsOld": ({"run_timestamp_seconds": "0x100"}, {"run_timestamp_seconds": "0+300x100"}),
    "SemisharedHostSilent": ({'host_up{host="h1"}': "0x100"}, {'host_up{host="h1"}': "1x100"}),
    "SemisharedActionsFail": (
        # The first of its kind, after long.
        {f"action_seconds_count{{{FAILED}}}": "_x98 1x9"},
        {f"action_seconds_count{{{FAILED}}}": "7x100", f"action_seconds_count{{{OK_CLONE}}}": "0+9x100"},
    ),
    "SemisharedActionsSlow": (
        {BUCKET % "10": "0+5x100", BUCKET % "30": "0+9x100", BUCKET % "+Inf": "0+9x100"},
        {BUCKET % "1": "0+9x100", BUCKET % "+Inf": "0+9x100"},
    ),
    "SemisharedBaseMissed": (
        {'base_uses_total{result="hit"}': "0+1x100", 'base_uses_total{result="miss"}': "0+5x100"},
        {'base_uses_total{result="hit"}': "0+5x100", 'base_uses_total{result="miss"}': "0+5x100"},
    ),
    "SemisharedBaseDamaged": ({'damaged_bases{host="h1"}': "1x100"}, {'damaged_bases{host="h1"}': "0x100"}),
    "SemisharedRoomShort": (
        {'free_bytes{host="h1"}': "4x100", 'floor_bytes{host="h1"}': "5x100"},
        {'free_bytes{host="h1"}': "6x100", 'floor_bytes{host="h1"}': "5x100"},
    ),
    "SemisharedDeviceFull": (
        {'device_free_bytes{device="/a"}': "9x100", 'device_size_bytes{device="/a"}': "100x100"},
        {'device_free_bytes{device="/a"}': "11x100", 'device_size_bytes{device="/a"}': "100x100"},
    ),
    "SemisharedDeviceWrong": ({'device_up{device="/a"}': "0x100"}, {'device_up{device="/a"}': "1x100"}),
    "SemisharedRecordsUnreadable": ({'host_errors{host="h1"}': "2x100"}, {'host_errors{host="h1"}': "0x100"}),
    "SemisharedUncommitted": (
        {'uncommitted_bytes{host="h1"}': "5x100"},
        {'uncommitted_bytes{host="h1"}': "5x90 0 5x9"},
    ),
    "SemisharedKept": ({'kept_disks{host="h1"}': "1x100"}, {'kept_disks{host="h1"}': "0x100"}),
    "SemisharedFindings": (
        {'findings{severity="broken"}': "1x100", 'findings{severity="warning"}': "0x100"},
        {'findings{severity="broken"}': "0x100", 'findings{severity="warning"}': "9x100"},
    ),
    "SemisharedBuilds": (
        {'build_info{release="a",instance="f1"}': "1x100", 'build_info{release="b",instance="f2"}': "1x100"},
        {'build_info{release="a",instance="f1"}': "1x100", 'build_info{release="a",instance="f2"}': "1x100"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("interval_m", "weeks"), [(5, False), (180, True)])
def test_each_alert_is_raised_by_its_cause_and_not_without_it(
    tmp_path: Path, interval_m: int, weeks: bool
) -> None:
    """`weeks`: the alerts that look back for days, which need longer intervals."""
    assert list(RAISED) == re.findall(r"(?m)^  - alert: (\w+)$", RULES.read_text())
    # promtool compares labels and texts of alerts; what is asked here is which there are. No two alerts look
    # at the same series: a group with all causes, and one with none of them, each in a storage of its own.
    asked = []
    firing = 'count(ALERTS{{alertname="{}",alertstate="firing"}}) > bool 0 or vector(0)'
    for number in (0, 1):
        of_these = {alert: series[number] for alert, series in RAISED.items() if (alert in LONG) == weeks}
        asked.append(
            {
                "interval": f"{interval_m}m",
                "input_series": [
                    {"series": f"semishared_{name}", "values": values}
                    for given in of_these.values()
                    for name, values in given.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": firing.format(alert),
                        "eval_time": f"{100 * interval_m}m",
                        "exp_samples": [{"labels": "{}", "value": 1 - number}],
                    }
                    for alert in of_these
                ],
            }
        )
    cases = tmp_path / "cases.yml"
    # JSON is YAML.
    cases.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": f"{interval_m}m", "tests": asked})
    )
    assert "SUCCESS" in promtool("test", "rules", str(cases))


# -- the whole way ----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def awaited(ask: Callable[[], Any], what: str) -> Any:
    """Return what `ask` does as soon as it is something."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            found = ask()
        except (urllib.error.URLError, ConnectionError):
            found = None
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(what)


@contextmanager
def program(log: Path, *argv: str) -> Iterator[None]:
    with open(log, "wb") as said:
        started = subprocess.Popen(argv, stdout=said, stderr=said)
    try:
        yield
        assert started.poll() is None, log.read_text()
    finally:
        started.terminate()
        started.wait(60)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that reads node_exporter, which reads our file; with our rules."""
    top = tmp_path_factory.mktemp("prometheus")
    (top / "text").mkdir()
    (top / "text/semishared.prom").write_text(metrics.text(FACTS))
    node, own = (f"127.0.0.1:{free_port()}" for _ in range(2))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "node_exporter", "static_configs": [{"targets": [node]}]}],
    }
    (top / "prometheus.yml").write_text(json.dumps(config))
    promtool("check", "config", str(top / "prometheus.yml"))
    exporter = (
        "prometheus-node-exporter",
        "--collector.disable-defaults",
        "--collector.textfile",
        f"--collector.textfile.directory={top}/text",
        f"--web.listen-address={node}",
    )
    server = (
        "prometheus",
        f"--config.file={top}/prometheus.yml",
        f"--storage.tsdb.path={top}/data",
        f"--web.listen-address={own}",
    )
    with program(top / "node.log", *exporter), program(top / "prometheus.log", *server):
        yield f"http://{own}"


def asked(address: str, expr: str) -> List[Any]:
    """Return what Prometheus answers to an expression."""
    answer = json.loads(get(f"{address}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"))
    assert answer["status"] == "success", answer
    return list(answer["data"]["result"])


def test_prometheus_reads_every_metric_through_node_exporter(prometheus: str) -> None:
    assert awaited(lambda: asked(prometheus, "semishared_build_info"), "no metric has come")
    assert [one["value"][1] for one in asked(prometheus, "node_textfile_scrape_error")] == ["0"]
    for name, metric in METRICS.items():
        found = asked(prometheus, f"{name}_count" if metric.type == "histogram" else name)
        assert found, name
        for one in found:
            assert set(one["metric"]) == {"__name__", "instance", "job", *metric.labels}
    up = {one["metric"]["host"]: one["value"][1] for one in asked(prometheus, "semishared_host_up")}
    assert up == {"h1": "1", "h2": "0", HOSTILE.replace("\udc80", "?"): "1"}
    (half,) = asked(
        prometheus, 'histogram_quantile(0.5, semishared_action_seconds_bucket{source="store",outcome="ok"})'
    )
    assert 60 <= float(half["value"][1]) <= 300


def test_prometheus_takes_the_rules_and_each_expression_of_the_dashboard(prometheus: str) -> None:
    awaited(lambda: asked(prometheus, "semishared_build_info"), "no metric has come")
    rules = awaited(
        lambda: [
            rule
            for group in json.loads(get(f"{prometheus}/api/v1/rules"))["data"]["groups"]
            for rule in group["rules"]
            if rule["health"] == "ok"
        ],
        "no rule was evaluated",
    )
    assert [rule["name"] for rule in rules] == list(RAISED)
    dashboard = json.loads(DASHBOARD.read_text())
    shown = 0
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expr = target["expr"].replace("$__rate_interval", "5m")
            expr = expr.replace("$host", ".*").replace("$instance", ".*")
            assert "$" not in expr
            shown += bool(asked(prometheus, expr))
    # A rate needs two samples, and a host that is not well is not there.
    assert shown > len(dashboard["panels"]) // 2


def test_prometheus_takes_the_expression_of_the_page(prometheus: str) -> None:
    awaited(lambda: asked(prometheus, "semishared_build_info"), "no metric has come")
    (expr,) = re.findall(r"(?m)^    node_load1 and on \(instance\) (label_replace.*)$", PAGE.read_text())
    assert asked(prometheus, expr.replace("<", ">"))[0]["metric"]["instance"] == "h1:9100"
    assert asked(prometheus, f"node_load1 and on (instance) {expr}") == []


@pytest.mark.parametrize("name", ["DS_PROMETHEUS"])
def test_the_dashboard_is_as_opennebulas_script_leaves_it(name: str) -> None:
    """patch_dashboards.rb adds a variable to each that has not exactly this one."""
    (found,) = (
        item for item in json.loads(DASHBOARD.read_text())["templating"]["list"] if item["name"] == name
    )
    assert found == {
        "hide": 0,
        "label": "datasource",
        "name": name,
        "options": [],
        "query": "prometheus",
        "refresh": 1,
        "regex": "",
        "type": "datasource",
    }
