# SPDX-License-Identifier: Apache-2.0
"""The options of a live migration in libvirt's terms.

kvmrc's MIGRATE_OPTIONS are words of `virsh migrate`, [migration] of semishared.conf are ours. What only one
of the two says holds; where both say something of the same, they have to agree.

Names of flags and parameters are those of libvirt's constants without VIR_MIGRATE_ and VIR_MIGRATE_PARAM_.
"""

from __future__ import annotations

from typing import Union

from ...errors import BadArguments, BadAttribute, NotSupported
from ...model.vm.live_steps import MigrateOptions
from ...named import NamedTuple

Value = Union[int, str, "list[str]"]
FLAGS = {
    "--live": "LIVE",
    "--offline": "OFFLINE",
    "--p2p": "PEER2PEER",
    "--tunnelled": "TUNNELLED",
    "--persistent": "PERSIST_DEST",
    "--undefinesource": "UNDEFINE_SOURCE",
    "--suspend": "PAUSED",
    "--change-protection": "CHANGE_PROTECTION",
    "--unsafe": "UNSAFE",
    "--compressed": "COMPRESSED",
    "--auto-converge": "AUTO_CONVERGE",
    "--rdma-pin-all": "RDMA_PIN_ALL",
    "--abort-on-error": "ABORT_ON_ERROR",
    "--postcopy": "POSTCOPY",
    "--postcopy-resume": "POSTCOPY_RESUME",
    "--parallel": "PARALLEL",
    "--tls": "TLS",
    "--zerocopy": "ZEROCOPY",
}
NUMBERS = {
    "--bandwidth": "BANDWIDTH",
    "--postcopy-bandwidth": "BANDWIDTH_POSTCOPY",
    "--parallel-connections": "PARALLEL_CONNECTIONS",
    "--auto-converge-initial": "AUTO_CONVERGE_INITIAL",
    "--auto-converge-increment": "AUTO_CONVERGE_INCREMENT",
    "--comp-mt-level": "COMPRESSION_MT_LEVEL",
    "--comp-mt-threads": "COMPRESSION_MT_THREADS",
    "--comp-mt-dthreads": "COMPRESSION_MT_DTHREADS",
    "--comp-xbzrle-cache": "COMPRESSION_XBZRLE_CACHE",
}
TEXTS = {
    "--migrateuri": "URI",
    "--graphicsuri": "GRAPHICS_URI",
    "--listen-address": "LISTEN_ADDRESS",
    "--tls-destination": "TLS_DESTINATION",
}
IGNORED = ("--verbose",)
"""Nobody watches."""


def parsed(words: list[str]) -> MigrateOptions:
    """Return what words of `virsh migrate` mean; raise NotSupported, BadArguments."""
    flags: dict[str, None] = {}
    values: dict[str, Value] = {}
    found = MigrateOptions()
    rest = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while rest:
        word = rest.pop(0)
        if word in FLAGS:
            flags[FLAGS[word]] = None
        elif word in NUMBERS:
            values[NUMBERS[word]] = _number(word, rest)
        elif word in TEXTS:
            values[TEXTS[word]] = _text(word, rest)
        elif word == "--comp-methods":
            values["COMPRESSION"] = _text(word, rest).split(",")
        elif word == "--timeout":
            found = found._replace(limit_s=_number(word, rest))
        elif word in ("--timeout-suspend", "--timeout-postcopy"):
            found = found._replace(at_limit=word.rpartition("-")[2])
        elif word == "--postcopy-after-precopy":
            found = found._replace(after_precopy=True)
        elif word not in IGNORED:
            raise NotSupported(f"MIGRATE_OPTIONS of kvmrc contains {word}, which semishared has no use for")
    return found._replace(flags=tuple(flags), values=values)


class Settings(NamedTuple):
    """[migration] of semishared.conf (config.py); by default it says nothing."""

    rate: int = 0
    """Bytes per second."""
    downtime_ms: int = 0
    auto_converge: str = "no"
    timeout_s: int = 0
    at_timeout: str = "abort"


def with_settings(options: MigrateOptions, settings: Settings) -> MigrateOptions:
    """Return the options with what [migration] says; raise BadAttribute if kvmrc says otherwise."""
    flags, values, rate = list(options.flags), dict(options.values), settings.rate >> 20
    at_limit = settings.at_timeout.replace("-", "")
    if rate:
        _agreed("--bandwidth", values.get("BANDWIDTH", rate), "rate", rate)
        values["BANDWIDTH"] = rate
    if settings.auto_converge == "yes":
        flags.append("AUTO_CONVERGE")
    if settings.timeout_s:
        said = (options.limit_s, options.at_limit) if options.limit_s else (settings.timeout_s, at_limit)
        _agreed("--timeout", "{} ({})".format(*said), "timeout_s", f"{settings.timeout_s} ({at_limit})")
        options = options._replace(limit_s=settings.timeout_s, at_limit=at_limit)
        if at_limit == "postcopy":
            flags.append("POSTCOPY")
    if rate and "POSTCOPY" in flags:
        values.setdefault("BANDWIDTH_POSTCOPY", rate)
    return options._replace(
        flags=tuple(dict.fromkeys(flags)), values=values, downtime_ms=settings.downtime_ms, memory_mib_s=rate
    )


def _agreed(word: str, said: object, key: str, wanted: object) -> None:
    if said != wanted:
        raise BadAttribute(
            f"MIGRATE_OPTIONS of kvmrc has {word} {said}, [migration] of semishared.conf {key} = "
            f"{wanted}: only one of them can hold"
        )


def with_disks(options: MigrateOptions, targets: list[str]) -> MigrateOptions:
    """Return the options by which libvirt copies the active layers of these disks, and no others."""
    if not targets:
        return options
    values = {**options.values, "MIGRATE_DISKS": targets}
    if options.memory_mib_s:
        # libvirt lets each disk take that much, all at once.
        values["BANDWIDTH"] = max(1, options.memory_mib_s // len(targets))
    return options._replace(flags=(*options.flags, "NON_SHARED_INC"), values=values)


def _text(word: str, rest: list[str]) -> str:
    if not rest:
        raise BadArguments(f"MIGRATE_OPTIONS of kvmrc: nothing follows {word}")
    return rest.pop(0)


def _number(word: str, rest: list[str]) -> int:
    text = _text(word, rest)
    if not (text.isascii() and text.isdigit()):
        raise BadArguments(f"MIGRATE_OPTIONS of kvmrc: {word} is {text!r}")
    return int(text)
