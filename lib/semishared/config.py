# SPDX-License-Identifier: Apache-2.0
"""etc/semishared.conf: site settings, each with a default; the file may be missing.

Settings of an image or a datastore are attributes of it in OpenNebula, not keys here.
"""

from __future__ import annotations

import os
import re
from typing import Iterable, Union

from .errors import BadAttribute, BadSetting
from .named import NamedTuple

NONE = "none"
DEFAULT = "DEFAULT"
"""The section with the values of all other sections that do not set them."""


def read(path: str) -> dict[tuple[str, str], str]:
    """Return the values by (section, key), none if there is no such file; raise BadSetting.

    It reads sections and `key = value` as configparser does, which with its regular expressions costs every
    action 4 ms.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except UnicodeDecodeError as e:
        raise BadSetting(f"semishared.conf: {e}") from None
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as e:
        # The defaults would not be what the administrator has written there.
        raise BadSetting(f"semishared.conf cannot be read: {e.strerror}: {path}") from None
    found: dict[tuple[str, str], list[str]] = {}
    sections: set[str] = set()
    section, value, depth = "", None, 0
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text.startswith(("#", ";")):
            continue
        indent = len(line) - len(line.lstrip())
        if not text or (value is not None and indent > depth):
            # Part of a value of several lines.
            if value is not None:
                value.append(text)
            continue
        depth = indent
        if text.startswith("[") and "]" in text[2:]:
            section, value = text[1 : text.rindex("]")], None
            if section in sections and section != DEFAULT:
                raise BadSetting(f"semishared.conf: line {number}: [{section}] is there twice")
            sections.add(section)
            continue
        delimiter = min("=:", key=lambda sign: text.find(sign) % (len(text) + 1))
        key, is_one, rest = text.partition(delimiter)
        key = key.strip().lower()
        if not section or not is_one or not key:
            raise BadSetting(
                f"semishared.conf: line {number}: {text!r} is neither [section] nor key = value in one"
            )
        if (section, key) in found:
            raise BadSetting(f"semishared.conf: line {number}: {key!r} is in [{section}] twice")
        value = found[section, key] = [rest.strip()]
    values = {name: "\n".join(lines).rstrip() for name, lines in found.items() if name[0] != DEFAULT}
    for (whose, key), lines in found.items():
        for section in sections - {DEFAULT} if whose == DEFAULT else ():
            values.setdefault((section, key), "\n".join(lines).rstrip())
    return values


PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "etc", "semishared.conf")
OPTIONS = r"(by-size|[a-z0-9_]+=[A-Za-z0-9.]+(,[a-z0-9_]+=[A-Za-z0-9.]+)*)?\Z"

FREEZES = ("agent-or-suspend", "agent", "suspend", "none")
COMPRESSORS = ("auto", "zstd", "lzop", "none")
CHOICES = {
    "staging_compress": COMPRESSORS,
    "staging_trusted_network": ("yes", "no"),
    "snapshots_freeze": FREEZES,
    "migration_auto_converge": ("yes", "no"),
    "migration_at_timeout": ("abort", "suspend", "post-copy"),
}
RATES = ("uploads_least_rate", "staging_rate", "migration_rate", "backup_rate")
IO_CLASS = "io_class_"
LEAST_BYTES, MOST_BYTES = 1 << 20, 10**15
"""Bytes per second of an I/O class: less would stop a guest, and QEMU takes no more."""
LEAST_SILENCE_S = 10
"""A host reports every 5 s that it is alive (host/service.py), and may be late."""
LIBVIRTS_UNIT = 1 << 20
"""Bytes: libvirt counts rates of migrations in MiB per second."""


class Config(NamedTuple):
    """The settings; names are `section_key`."""

    network_bulk: str = NONE
    hosts_scripts_dir: str = "/var/tmp/one"
    hosts_connect_timeout_s: int = 10
    hosts_silence_timeout_s: int = 25
    hosts_standstill_timeout_s: int = 1800
    images_max_virtual_size_gib: int = 65536
    uploads_stat_limit_s: int = 60
    uploads_least_rate: int = 32 << 10
    uploads_least_rate_s: int = 120
    overlays_options: str = "by-size"
    bases_size_limit: str = "none"
    bases_free_floor: str = "5%"
    staging_compress: str = "auto"
    staging_rate: int = 0
    staging_portbase: int = 9000
    staging_trusted_network: str = "no"
    snapshots_freeze: str = "agent-or-suspend"
    pool_devices: str = "none"
    migration_rate: int = 0
    migration_downtime_ms: int = 300
    migration_auto_converge: str = "no"
    migration_timeout_s: int = 0
    migration_at_timeout: str = "abort"
    backup_rate: int = 0
    fence_command: str = "none"
    fence_timeout_s: int = 120
    io_class_production_bytes: int = 0
    io_class_production_iops: int = 0
    io_class_normal_bytes: int = 0
    io_class_normal_iops: int = 0
    io_class_scratch_bytes: int = 100 << 20
    io_class_scratch_iops: int = 2000

    @property
    def freeze(self) -> str:
        """How a guest rests while a snapshot of its disk is taken, in the words of steps."""
        return self.snapshots_freeze.upper()

    @property
    def is_network_trusted(self) -> bool:
        """Whether data between hosts may be read on the way."""
        return self.staging_trusted_network == "yes"

    @property
    def migration(self) -> dict[str, Union[int, str]]:
        """[migration], for a host's plan (plan/vm/migration.py)."""
        section = "migration_"
        return {
            name[len(section) :]: value for name, value in self._asdict().items() if name.startswith(section)
        }

    @property
    def io_limits(self) -> dict[str, tuple[int, int]]:
        """[io_class], by class: bytes and operations per second of a disk, 0 for no limit."""
        found: dict[str, dict[str, int]] = {}
        for name, value in self._asdict().items():
            if name.startswith(IO_CLASS):
                io_class, _, what = name[len(IO_CLASS) :].partition("_")
                found.setdefault(io_class, {})[what] = value
        return {name: (limits["bytes"], limits["iops"]) for name, limits in found.items()}

    @property
    def fencing(self) -> list[str]:
        """The words of the command that switches a host off, without the host's name; none without one."""
        import shlex

        return [] if self.fence_command == "none" else shlex.split(self.fence_command)


def load(path: str = PATH) -> Config:
    """Return the settings of `path`; raise BadPool, or BadSetting for an unknown key or a wrong value."""
    defaults = Config()._asdict()
    values: dict[str, object] = {}
    for (section, key), text in read(path).items():
        name = f"{section}_{key}"
        if name not in defaults:
            unknown = f"unknown key {key!r} in [{section}]{_meant(section, key, defaults)}"
            raise BadSetting(f"semishared.conf: {unknown}")
        values[name] = _value(name, key, text, defaults[name])
    config = Config(**values)  # type: ignore[arg-type]
    if not re.match(OPTIONS, config.overlays_options):
        raise BadSetting(
            f"semishared.conf: options = {config.overlays_options!r} is neither by-size nor "
            f"key=value,key=value"
        )
    if not re.match(r"/[A-Za-z0-9._/\-]+\Z", config.hosts_scripts_dir):
        raise BadSetting(f"semishared.conf: scripts_dir = {config.hosts_scripts_dir!r} is not a plain path")
    if config.hosts_silence_timeout_s < LEAST_SILENCE_S:
        raise BadSetting(
            f"semishared.conf: silence_timeout_s = {config.hosts_silence_timeout_s} is less than "
            f"{LEAST_SILENCE_S}"
        )
    if config.staging_portbase % 2 or not 1024 <= config.staging_portbase <= 65000:
        raise BadSetting(
            f"semishared.conf: portbase = {config.staging_portbase} is not an even number from 1024 to 65000"
        )
    if 0 < config.migration_rate < LIBVIRTS_UNIT:
        raise BadSetting(
            "semishared.conf: rate in [migration] is less than 1M: libvirt counts in MiB per second"
        )
    if config.migration_at_timeout != "abort" and not config.migration_timeout_s:
        raise BadSetting(
            f"semishared.conf: at_timeout = {config.migration_at_timeout} has no timeout_s at "
            f"which it would happen"
        )
    for name, (rate, _) in config.io_limits.items():
        if rate and not LEAST_BYTES <= rate <= MOST_BYTES:
            raise BadSetting(f"semishared.conf: {name}_bytes in [io_class] is not from 1M to 900000G")
    if (config.bases_size_limit, config.bases_free_floor) != (
        defaults["bases_size_limit"],
        defaults["bases_free_floor"],
    ):
        from .plan.base import eviction

        try:
            eviction.limits(config.bases_size_limit, config.bases_free_floor, 1)
        except BadAttribute as e:
            raise BadSetting(f"semishared.conf: {e.detail}") from None
    if config.pool_devices != "none":
        from .plan.device import choose

        choose.declared(config.pool_devices)
    if config.network_bulk != NONE:
        from .model import bulk_network

        if not bulk_network.is_network(config.network_bulk):
            raise BadSetting(
                f"semishared.conf: bulk = {config.network_bulk!r} is neither a network as 10.20.0.0/16, an "
                f"address, nor none"
            )
    if config.fence_command != "none" and not _is_program(config):
        raise BadSetting(
            f"semishared.conf: command = {config.fence_command!r} in [fence] is neither "
            f"/a/program and its words nor none"
        )
    return config


def _is_program(config: Config) -> bool:
    try:
        return config.fencing[0].startswith("/")
    except (ValueError, IndexError):
        return False


def _meant(section: str, key: str, known: Iterable[str]) -> str:
    """Return which known key a misspelt one may be, '' if none is near."""
    import difflib

    whole = f"{section}_"
    of_section = [name[len(whole) :] for name in known if name.startswith(whole)]
    near = difflib.get_close_matches(key, of_section, 1)
    return f": {near[0]} is one" if near else ""


def _value(name: str, key: str, text: str, default: object) -> object:
    """Return the value of a key; raise BadSetting."""
    if name in RATES or (name.startswith(IO_CLASS) and name.endswith("_bytes")):
        return _rate(key, text)
    if isinstance(default, int):
        or_none = not default or name.startswith(IO_CLASS)
        return 0 if or_none and text == "none" else _number(key, text, or_none=or_none)
    if name in CHOICES and text not in CHOICES[name]:
        raise BadSetting(f"semishared.conf: {key} = {text!r} is not one of {', '.join(CHOICES[name])}")
    return text


def _number(key: str, text: str, or_none: bool) -> int:
    if not re.match(r"[0-9]{1,9}\Z", text, re.ASCII) or int(text) < 1:
        raise BadSetting(f"semishared.conf: {key} = {text!r} is not a positive number{' or none' * or_none}")
    return int(text)


def _rate(key: str, text: str) -> int:
    """Return bytes per second, 0 for none; raise BadSetting."""
    match = re.match(r"([0-9]{1,12}(?:\.[0-9]{1,3}(?=[KMG]))?)([KMG]?)\Z", text.upper(), re.ASCII)
    if text != "none" and not match:
        raise BadSetting(f"semishared.conf: {key} = {text!r} is neither bytes per second (32K) nor none")
    return (
        int(float(match.group(1)) * (1 << {"": 0, "K": 10, "M": 20, "G": 30}[match.group(2)])) if match else 0
    )
