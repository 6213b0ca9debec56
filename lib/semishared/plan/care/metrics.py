# SPDX-License-Identifier: Apache-2.0
"""What `semishared metrics` writes: the table of all metrics, and facts as Prometheus' text format.

    # HELP semishared_bases Bases on a machine
    # TYPE semishared_bases gauge
    semishared_bases{host="h1"} 3

How many series there are depends on hosts, devices of pools, and combinations of actions, places, sources
and outcomes that have occurred (at most MOST of these). No label names a VM, an image or a file: each value
of such a label would be a series for as long as Prometheus keeps any.

The alert rules, the dashboard (share/) and docs/how-to/metrics.md name metrics and labels of METRICS alone.
"""

from __future__ import annotations

from typing import Dict, Iterable, Iterator, List, Mapping, Sequence, Tuple, Union

from ...model.disk.place import PLACES
from ...named import NamedTuple

Number = Union[int, float]
Labels = Tuple[Tuple[str, str], ...]

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
SEVERITIES = ("warning", "broken")
NONE, OK = "none", "ok"
SOURCES = ("store", "peer", "base", NONE)
"""Where most bytes of an action came from; NONE: none came."""
LEASING = ("tm/clone", "tm/ln")
"""Actions that make a disk over a base."""
SECONDS: Tuple[Number, ...] = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
"""Bounds of durations: warm actions take tenths of a second, those that copy take minutes."""
BYTES: Tuple[Number, ...] = tuple(1 << power for power in (20, 24, 27, 30, 33, 36, 40))
"""Bounds of amounts: 1, 16, 128 MiB, 1, 8, 64 GiB, 1 TiB."""
MOST = 1000
"""Combinations of action, place, source and outcome that are told apart."""


class Metric(NamedTuple):
    """A row of the table."""

    name: str
    type: str
    help: str
    labels: Tuple[str, ...] = ()


_ACTION = ("action", "place", "source", "outcome")
_DEVICE = ("host", "device", "class")
_ROWS = (
    Metric("build_info", GAUGE, "The front-end's build, always 1", ("version", "release")),
    Metric("run_timestamp_seconds", GAUGE, "When the metrics were written, in seconds since the epoch"),
    Metric("run_seconds", GAUGE, "How long it took to ask OpenNebula and all machines"),
    Metric(
        "action_seconds",
        HISTOGRAM,
        "Durations of the actions that OpenNebula has asked for, on this front-end",
        _ACTION,
    ),
    Metric("action_bytes", HISTOGRAM, "Bytes moved by the actions that have moved any", _ACTION),
    Metric(
        "base_uses_total",
        COUNTER,
        "Disks that were made over a base: a hit if the host had it, a miss if it had to come",
        ("result",),
    ),
    Metric("uncounted_actions_total", COUNTER, "Lines of actions that could not be counted"),
    Metric(
        "host_up", GAUGE, "Whether a machine has answered; one that has not has no other metric", ("host",)
    ),
    Metric("host_errors", GAUGE, "VM directories that a machine could not read", ("host",)),
    Metric("bases", GAUGE, "Bases on a machine", ("host",)),
    Metric("base_bytes", GAUGE, "Bytes that the bases of a machine take", ("host",)),
    Metric("base_leases", GAUGE, "Leases of disks on the bases of a machine", ("host",)),
    Metric(
        "damaged_bases",
        GAUGE,
        "Bases that are out of use because they differ from their manifests",
        ("host",),
    ),
    Metric("size_bytes", GAUGE, "Size of the file system for new bases", ("host",)),
    Metric("free_bytes", GAUGE, "Free bytes of the file system for new bases", ("host",)),
    Metric(
        "floor_bytes",
        GAUGE,
        "Bytes that bases leave free there (SEMISHARED_BASES_FLOOR, free_floor)",
        ("host",),
    ),
    Metric("disks", GAUGE, "Disks on a machine, by where they lie and over what", ("host", "place")),
    Metric("disk_bytes", GAUGE, "Bytes that these disks take on the machine", ("host", "place")),
    Metric(
        "uncommitted_bytes", GAUGE, "Bytes of local disks that their persistent images do not have", ("host",)
    ),
    Metric(
        "kept_disks", GAUGE, "Disks of deleted VMs that are kept because they are not committed", ("host",)
    ),
    Metric("kept_bytes", GAUGE, "Bytes of kept disks that no image has", ("host",)),
    Metric("device_up", GAUGE, "Whether nothing is wrong with a device of a pool", _DEVICE),
    Metric("device_size_bytes", GAUGE, "Size of a device of a pool", _DEVICE),
    Metric("device_free_bytes", GAUGE, "Free bytes of a device of a pool", _DEVICE),
    Metric("device_disks", GAUGE, "Disks on a device of a pool", _DEVICE),
    Metric("device_bases", GAUGE, "Bases on a device of a pool", _DEVICE),
    Metric("jobs", GAUGE, "Work under way that moves bytes, by kind", ("host", "kind")),
    Metric("findings", GAUGE, "What needs an administrator, by severity", ("severity",)),
)
PREFIX = "semishared_"
METRICS: Dict[str, Metric] = {
    f"{PREFIX}{row.name}": row._replace(name=f"{PREFIX}{row.name}") for row in _ROWS
}
"""Name -> its row."""


class Counted(NamedTuple):
    """Actions of one combination, since counting began; of each histogram how many are at most as much as
    each bound, and more than the one before.
    """

    times: int = 0
    ms: int = 0
    seconds: Tuple[int, ...] = (0,) * len(SECONDS)
    moving: int = 0
    """Actions that have moved bytes."""
    bytes: int = 0
    sizes: Tuple[int, ...] = (0,) * len(BYTES)

    def and_one(self, ms: int, size: int) -> Counted:
        """Return the same with one action more."""
        return Counted(
            self.times + 1,
            self.ms + ms,
            _with(self.seconds, SECONDS, ms / 1000),
            self.moving + bool(size),
            self.bytes + size,
            _with(self.sizes, BYTES, size) if size else self.sizes,
        )


def _with(counts: Tuple[int, ...], bounds: Sequence[Number], value: Number) -> Tuple[int, ...]:
    """Return the counts with one more at the first bound that is not below the value, if there is one."""
    place = sum(bound < value for bound in bounds)
    return tuple(count + (number == place) for number, count in enumerate(counts))


Key = Tuple[str, str, str, str]
"""Action (`tm/clone`), place, source, outcome."""


class Device(NamedTuple):
    """A device of a pool."""

    path: str
    class_: str
    is_well: bool
    total: int
    free: int
    disks: int
    bases: int


class Machine(NamedTuple):
    """What a machine has said."""

    errors: int = 0
    bases: int = 0
    base_bytes: int = 0
    leases: int = 0
    damaged: int = 0
    total: int = 0
    free: int = 0
    floor: int = -1
    """-1: what is configured is no size."""
    disks: Mapping[str, Tuple[int, int]] = {}
    """By place, number and bytes of disks."""
    uncommitted: int = 0
    kept: int = 0
    kept_bytes: int = 0
    devices: Sequence[Device] = ()


class Facts(NamedTuple):
    """All that is known."""

    version: str
    release: str
    now: float
    seconds: float
    actions: Mapping[Key, Counted] = {}
    uncounted: int = 0
    machines: Mapping[str, Union[Machine, None]] = {}
    """None: it has not answered."""
    jobs: Sequence[Tuple[str, str]] = ()
    """Machine and kind of each."""
    findings: Sequence[str] = ()
    """Severity of each."""


def text(facts: Facts) -> str:
    """Return the facts as text; a metric of which there is nothing to be said is not in it."""
    said: Dict[str, List[str]] = {}
    for name, line in _lines(facts):
        said.setdefault(name, []).append(line)
    found = []
    for name, metric in METRICS.items():
        if name in said:
            found += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.type}", *said[name]]
    return "\n".join(found) + "\n"


def _lines(facts: Facts) -> Iterator[Tuple[str, str]]:
    """Yield each sample with the metric that it is of."""
    yield _sample("build_info", 1, facts.version, facts.release)
    yield _sample("run_timestamp_seconds", facts.now)
    yield _sample("run_seconds", facts.seconds)
    for key, counted in sorted(facts.actions.items()):
        yield from _histogram(
            "action_seconds", key, SECONDS, counted.seconds, counted.times, counted.ms / 1000
        )
    for key, counted in sorted(facts.actions.items()):
        if counted.moving:
            yield from _histogram("action_bytes", key, BYTES, counted.sizes, counted.moving, counted.bytes)
    hits, misses = _uses(facts.actions)
    yield _sample("base_uses_total", hits, "hit")
    yield _sample("base_uses_total", misses, "miss")
    yield _sample("uncounted_actions_total", facts.uncounted)
    for host, machine in sorted(facts.machines.items()):
        yield _sample("host_up", int(machine is not None), host)
        if machine is not None:
            yield from _of_machine(host, machine)
    for job in sorted(set(facts.jobs)):
        yield _sample("jobs", facts.jobs.count(job), *job)
    for severity in SEVERITIES:
        yield _sample("findings", list(facts.findings).count(severity), severity)


def _of_machine(host: str, machine: Machine) -> Iterator[Tuple[str, str]]:
    for name, value in (
        ("host_errors", machine.errors),
        ("bases", machine.bases),
        ("base_bytes", machine.base_bytes),
        ("base_leases", machine.leases),
        ("damaged_bases", machine.damaged),
        ("size_bytes", machine.total),
        ("free_bytes", machine.free),
        ("uncommitted_bytes", machine.uncommitted),
        ("kept_disks", machine.kept),
        ("kept_bytes", machine.kept_bytes),
    ):
        yield _sample(name, value, host)
    if machine.floor >= 0:
        yield _sample("floor_bytes", machine.floor, host)
    for place in PLACES:
        count, size = machine.disks.get(place, (0, 0))
        yield _sample("disks", count, host, place)
        yield _sample("disk_bytes", size, host, place)
    for device in _told_apart(machine.devices):
        labels = host, device.path, device.class_
        yield _sample("device_up", int(device.is_well), *labels)
        if device.total:
            yield _sample("device_size_bytes", device.total, *labels)
            yield _sample("device_free_bytes", device.free, *labels)
        yield _sample("device_disks", device.disks, *labels)
        yield _sample("device_bases", device.bases, *labels)


def _told_apart(devices: Iterable[Device]) -> List[Device]:
    """Return one device of each path and class, one that is not well first: a sample that comes twice makes
    node_exporter refuse the whole file.
    """
    found: Dict[Tuple[str, str], Device] = {}
    for device in devices:
        known = found.setdefault((device.path, device.class_), device)
        if known.is_well and not device.is_well:
            found[device.path, device.class_] = device
    return [found[key] for key in sorted(found)]


def _uses(actions: Mapping[Key, Counted]) -> Tuple[int, int]:
    """Return how many disks were made over a base that was there, and over one that had to come."""
    found = {True: 0, False: 0}
    for (action, place, source, outcome), counted in actions.items():
        if action in LEASING and place in PLACES and PLACES[place].leases and outcome == OK:
            found[source == NONE] += counted.times
    return found[True], found[False]


def _histogram(
    name: str, key: Key, bounds: Sequence[Number], counts: Sequence[int], count: int, total: Number
) -> Iterator[Tuple[str, str]]:
    metric = METRICS[f"{PREFIX}{name}"]
    labels, below = tuple(zip(metric.labels, key)), 0
    for bound, more in zip(bounds, counts):
        below += more
        yield metric.name, f"{metric.name}_bucket{_labels((*labels, ('le', f'{bound}')))} {below}"
    yield metric.name, f"{metric.name}_bucket{_labels((*labels, ('le', '+Inf')))} {count}"
    yield metric.name, f"{metric.name}_sum{_labels(labels)} {total}"
    yield metric.name, f"{metric.name}_count{_labels(labels)} {count}"


def _sample(name: str, value: Number, *words: str) -> Tuple[str, str]:
    metric = METRICS[f"{PREFIX}{name}"]
    return metric.name, f"{metric.name}{_labels(tuple(zip(metric.labels, words)))} {value}"


def _labels(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in labels) + "}" if labels else ""


def quoted(value: str) -> str:
    """Return a label's value as the format has it: names of hosts and paths of devices are others' words.

    What is no character of UTF-8 becomes `?`: node_exporter would refuse the whole file for it.
    """
    plain = value.encode("utf-8", "replace").decode()
    return plain.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
