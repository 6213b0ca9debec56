# SPDX-License-Identifier: Apache-2.0
"""False answers: each place of what a host has answered truly, with what may not stand there, and what is no
answer at all.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Tuple

from tools.oned_site import STORE
from trust.lying_site import OTHERS, LyingSite

Lie = Dict[str, Any]
NO_ANSWERS = (
    "nested",
    "nested as far as goes",
    "NaN",
    "no answers",
    "answers to more",
    "an error of no kind",
    "an error with ESC",
    "a question for what is none",
    "no message",
    "a line without end",
    "data",
)
SLOW = ("words",)
NUMBERS: Tuple[Any, ...] = (-1, 1 << 70, 1.5, "7", None, [1])
TEXTS: Tuple[Any, ...] = (
    "../../../var/lib/one/x",
    "/etc/passwd",
    "\x1b]0;evil\x07\n12 two",
    "\ud800",
    "x" * 100_000,
    5,
    None,
    ["x"],
    {},
)
OBJECTS: Tuple[Any, ...] = (None, [], "x", 7, {"x": {}})
LISTS: Tuple[Any, ...] = (None, {}, "x", [7], [[[]]], ["../../x"], [{}])


def of_others(site: LyingSite, store: int) -> Dict[str, Any]:
    """Return the image of another tenant, as a record has it."""
    return {
        "store": store,
        "id": 900 + store,
        "format": "raw",
        "source": site.oned.image(900 + store).source,
        "generation": "",
    }


def images(site: LyingSite) -> List[Any]:
    own = of_others(site, OTHERS)
    access = {
        "kind": "rbd",
        "user": "x\nssh-ed25519 AAAA",
        "reader": "libvirt",
        "bridge_user": "libvirt",
        "hosts": ["127.0.0.1:1"],
        "secret": "",
        "conf": f"{site.location}/101/5/evil.conf",
        "data_pool": "",
    }
    return [
        own,
        of_others(site, STORE),
        {**own, "source": f"{site.home}/.one/one_auth"},
        {**own, "source": f"{own['source']}/../x"},
        {**own, "source": "one/one-66", "access": {**access, "user": "libvirt"}},
        {**own, "source": "one/one-66", "access": access},
    ]


def places(value: Any, at: Tuple[Any, ...] = ()) -> Iterator[Tuple[Tuple[Any, ...], Any]]:
    yield at, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*at, 0))


def instead(site: LyingSite, value: Any) -> List[Any]:
    """Return what may stand in the place of a value."""
    if isinstance(value, dict):
        return images(site) if "source" in value and "store" in value else list(OBJECTS)
    if isinstance(value, list):
        return list(LISTS)
    if isinstance(value, str):
        return [*TEXTS, of_others(site, OTHERS)["source"]]
    return [*NUMBERS, True] if isinstance(value, (int, float)) else [*OBJECTS, -1, True]


def added(site: LyingSite, step: str) -> Iterator[Lie]:
    """Yield answers that say of the disk that it is something of others'."""
    for image in images(site):
        for more in (
            {"on_store": image, "how": "store-clone", "readonly": False},
            {"settle": image, "bytes": 0},
            {
                "kept": [
                    {
                        "path": str(site.location / "101/5067"),
                        "vm": 5067,
                        "disk": 0,
                        "image": image,
                        "bytes": 5,
                        "size": 5,
                    }
                ]
            },
        ):
            yield {"step": step, "at": [], "by": more}
    for more in ({"commits": True}, {"kept": "\x1b[2J; rm -rf /"}, {"on_store": 5}, {"settle": [[]]}):
        yield {"step": step, "at": [], "by": more}


def all_of(site: LyingSite, truth: List[Tuple[str, Any]]) -> List[Lie]:
    """Return the lies instead of what was answered: each step's in turn, each kind in turn, so that a few of
    them are of all kinds.
    """
    found: List[List[Lie]] = []
    for step, answer in dict(truth).items():
        ways = [[{"step": step, "how": how} for how in NO_ANSWERS], list(added(site, step))]
        for at, value in places(answer):
            ways.append([{"step": step, "at": list(at), "by": by} for by in instead(site, value)])
        found += ways
    lies = []
    for number in range(max(map(len, found), default=0)):
        lies += [way[(number + place) % len(way)] for place, way in enumerate(found) if number < len(way)]
    return lies
