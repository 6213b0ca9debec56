# SPDX-License-Identifier: Apache-2.0
"""etc/semishared.conf: site settings, each with a default, so that the file may be missing.

What concerns an image or a datastore is an attribute of it in OpenNebula, not a key here.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from .errors import BadAttribute

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "etc", "semishared.conf")
OPTIONS = re.compile(r"([a-z0-9_]+=[A-Za-z0-9.]+(,[a-z0-9_]+=[A-Za-z0-9.]+)*)?\Z")

FREEZES = ("agent-or-suspend", "agent", "suspend", "none")
COMPRESSORS = ("auto", "zstd", "lzop", "none")


class Config(NamedTuple):
    """The settings; names are `section_key`."""

    hosts_scripts_dir: str = "/var/tmp/one"
    hosts_connect_timeout_s: int = 10
    hosts_silence_timeout_s: int = 25
    hosts_standstill_timeout_s: int = 1800
    images_max_virtual_size_gib: int = 65536
    uploads_stat_limit_s: int = 60
    uploads_least_rate: int = 32 << 10
    uploads_least_rate_s: int = 120
    overlays_options: str = "extended_l2=on,cluster_size=128k"
    bases_size_limit: str = "none"
    bases_free_floor: str = "5%"
    staging_compress: str = "auto"
    staging_rate: str = "none"
    staging_portbase: int = 9000
    snapshots_freeze: str = "agent-or-suspend"

    @property
    def freeze(self) -> str:
        """How a guest rests while a snapshot of its disk is taken, as steps say it."""
        return self.snapshots_freeze.upper()


def load(path: str = PATH) -> Config:
    """Return the settings of `path`; raise BadAttribute for an unknown key or a value of the wrong kind."""
    import configparser

    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as e:
        raise BadAttribute(f"semishared.conf: {e}") from None
    defaults = Config()._asdict()
    values: dict[str, object] = {}
    for section in parser.sections():
        for key, text in parser.items(section):
            name = f"{section}_{key}"
            if name not in defaults:
                raise BadAttribute(f"semishared.conf: unknown key {key!r} in [{section}]")
            if name == "uploads_least_rate":
                values[name] = _rate(text)
            elif isinstance(defaults[name], int):
                if not text.isascii() or not text.isdigit() or int(text) < 1:
                    raise BadAttribute(f"semishared.conf: {key} = {text!r} is not a positive number")
                values[name] = int(text)
            else:
                values[name] = text
    config = Config(**values)  # type: ignore[arg-type]
    if not OPTIONS.match(config.overlays_options):
        raise BadAttribute(f"semishared.conf: options = {config.overlays_options!r} is not key=value,key=value")
    if not re.match(r"/[A-Za-z0-9._/\-]+\Z", config.hosts_scripts_dir):
        raise BadAttribute(f"semishared.conf: scripts_dir = {config.hosts_scripts_dir!r} is not a plain path")
    if config.staging_compress not in COMPRESSORS:
        raise BadAttribute(f"semishared.conf: compress = {config.staging_compress!r} is not one of {', '.join(COMPRESSORS)}")
    if not re.match(r"none\Z|[0-9.]+[KMGkmg]?\Z", config.staging_rate):
        raise BadAttribute(f"semishared.conf: rate = {config.staging_rate!r} is neither bytes per second (40M) nor none")
    if config.snapshots_freeze not in FREEZES:
        raise BadAttribute(f"semishared.conf: freeze = {config.snapshots_freeze!r} is not one of {', '.join(FREEZES)}")
    if config.staging_portbase % 2 or not 1024 <= config.staging_portbase <= 65000:
        raise BadAttribute(f"semishared.conf: portbase = {config.staging_portbase} is not an even number from 1024 to 65000")
    return config


def _rate(text: str) -> int:
    """Return bytes per second, 0 for none; raise BadAttribute."""
    match = re.match(r"([0-9]{1,9})([KMG]?)\Z", text.upper(), re.ASCII)
    if text != "none" and not match:
        raise BadAttribute(f"semishared.conf: least_rate = {text!r} is neither bytes per second (32K) nor none")
    return int(match.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[match.group(2)] if match else 0
