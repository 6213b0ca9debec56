# SPDX-License-Identifier: Apache-2.0
"""What a base from a peer is held to, and what was expected of it (peer.py)."""

from __future__ import annotations

import itertools
from typing import Dict, List, Tuple

from figures import Figure

Samples = Dict[Tuple[str, str], List[float]]
WAYS = {"ssh": "over ssh", "trusted": "on a trusted network"}
EXPECTED = {
    ("ssh", "1 Gbit/s"): 0.9,
    ("trusted", "1 Gbit/s"): 0.93,
    ("ssh", "unshaped"): 0.6,
    ("trusted", "unshaped"): 0.75,
}
LIMIT = {"1 Gbit/s": 0.9, "unshaped": 0.7}
CPU = {"ssh": 1.25, "trusted": 0.65}
"""Of ssh with AES-GCM: what a table of docs/explanation/staging.md had before this was written."""
CIPHER = {"ssh": "; and here both ends of a cipher have two cores", "trusted": ""}
TRIED = (
    "who is not known is tried beside the store, and what that begins with, ssh and Python on either "
    "side, has two cores with it here"
)
CHOICES = {"known": "both known from before", "new": "nothing known"}
ENDS = {"sender": "the sender", "receiver": "the receiver", "both": "both ends"}
TAKEN = {
    "as they are": {},
    "the peer slow": {"known": (">=", 0.9), "new": (">=", 0.8)},
    "the store slow": {"known": ("<=", 0.1), "new": ("<=", 0.2)},
}
"""What part must come from the store, where it is slow or the peer is: where nothing is known, something
comes from the one to be left.
"""


def figures(samples: Samples, mib: int, cold_mib: int) -> List[Figure]:
    """Return them; `mib` and `cold_mib`: of the images."""
    found = [figure for way in WAYS for figure in _way(way, samples, mib)]
    for case in TAKEN:
        found += _choice(case, samples, mib)
    found += [
        Figure(
            "peer/cold/last",
            f"{cold_mib} MiB to 8 cold hosts that clone at once, at 100 Mbit/s: the last",
            "s",
            samples["cold", "last"],
            "one cold host alone, from the store",
            samples["cold", "one"],
            paired=False,
            expected=1.25,
            because="one chain: each passes on what has come, a third of a second behind the one before it",
            budget=("ratio", "<=", 1.3),
            budget_from="8 cold hosts at once",
            if_missed="not taken apart; the eight begin on the two cores that the one has to itself",
        ),
        Figure(
            "peer/cold/store",
            "read from the store by these 8, by the image's size",
            "times",
            samples["cold", "store"],
            expected=1.0,
            because="the first one reads it, the others follow it",
            budget=("value", "<=", 1.0),
            budget_from="8 cold hosts at once",
        ),
        Figure(
            "peer/cold/sectors",
            "given by the store's device meanwhile, by the image's size",
            "times",
            samples["cold", "sectors"],
            expected=1.0,
            because="the same, and the file system's own",
            budget=("value", "<=", 1.02),
            budget_from="8 cold hosts at once",
        ),
    ]
    return found


def _way(way: str, s: Samples, mib: int) -> List[Figure]:
    found = []
    for link, limit in LIMIT.items():
        found.append(
            Figure(
                f"peer/rate/{way}/{link}",
                f"a base of {mib} MiB from a peer {WAYS[way]}, {link}: the whole clone",
                "MiB/s",
                s[way, f"rate {link}"],
                "a plain TCP stream, written, hashed and synced",
                s["tcp", f"rate {link}"],
                expected=EXPECTED[way, link],
                because="two interpreters, two ssh, a manifest; then it is the cable, or the processors",
                budget=("ratio", ">=", limit),
                budget_from="a base from a peer is never the slow way",
                if_missed=(
                    "what is before the first byte, two interpreters with their ssh, is in ours "
                    "alone, and the same for any size"
                )
                + CIPHER[way],
            )
        )
    for link, (end, words) in itertools.product(LIMIT, ENDS.items()):
        is_both = end == "both"
        found.append(
            Figure(
                f"peer/cpu/{way}/{link}/{end}",
                f"CPU of {words} per GiB from a peer {WAYS[way]}, {link}",
                "s",
                s[way, f"{end} {link}"],
                "`ssh` with AES-GCM and `cat`, written, hashed and synced",
                s["aes", f"{end} {link}"],
                expected=CPU[way] if is_both else None,
                because="extents and packets are added, or the cipher is not there",
                budget=("ratio", "<=", 1.5) if is_both else None,
                budget_from="CPU of a base from a peer" if is_both else "",
            )
        )
    return found


def _choice(case: str, s: Samples, mib: int) -> List[Figure]:
    found = [
        Figure(f"peer/choice/{case}/{name}", f"{mib} MiB with {case}: {words}", "s", s[case, name])
        for name, words in (("peer", "from the peer alone"), ("store", "from the store alone"))
    ]
    for kind, words in CHOICES.items():
        found.append(
            Figure(
                f"peer/choice/{case}/{kind}",
                f"{mib} MiB with {case}: as the host chooses, {words}",
                "s",
                s[case, kind],
                "the better of peer and store",
                s[case, "better"],
                expected=1.05 if kind == "known" else 1.2,
                because="what is known is taken; what is not is tried for eight extents",
                budget=("ratio", "<=", 1.1),
                budget_from="one host asking",
                if_missed=TRIED if kind == "new" else "",
            )
        )
        allowed = TAKEN[case].get(kind)
        found.append(
            Figure(
                f"peer/choice/{case}/{kind}-part",
                f"of that from the store, {words}",
                "of all",
                s[case, f"{kind} part"],
                expected={"the peer slow": 1.0, "the store slow": 0.0}.get(case) if kind == "known" else None,
                because="the choice flips",
                budget=("value", *allowed) if allowed else None,
                budget_from="the choice flips" if allowed else "",
            )
        )
    return found
