# SPDX-License-Identifier: Apache-2.0
"""What staging is held to, and what was expected of it (stage.py)."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

from figures import Figure

MBIT = 100
Samples = Dict[Tuple[str, int], List[float]]
EXPECTED = {"multicast": 1.05, "chain": 1.25, "unicast": 12.0, "scp": 15.0, "convert": 15.0, "udpcast": 1.05}
"""time(16) / time(1), before the first measurement."""
WHY = {
    "multicast": "one stream; about 2 s of rendez-vous and of ssh to 16 hosts are in both",
    "chain": "a third of a second per host and extent of 4 MiB, 16 times; and this machine's CPU "
    "encrypts 16 times",
    "unicast": "the sender's cable carries it 16 times, but N = 1 pays more for its ssh",
    "scp": "the sender's cable carries it N times",
    "convert": "the store's cable carries it N times",
    "udpcast": "one stream; what it costs to start is its own",
}


def figures(
    counts: List[int],
    ways: Sequence[str],
    samples: Samples,
    extra: Dict[str, List[float]],
    mib: int,
    large: int,
) -> List[Figure]:
    """Return them; `mib` and `large`: of the images."""
    most = max(counts)
    found: List[Figure] = []
    for method in ways:
        for count in counts:
            if samples.get((method, count)):
                is_last = count == most and method == "multicast"
                found.append(
                    Figure(
                        f"stage/{method}/{count}",
                        f"{method} of {mib} MiB to {count} hosts, {MBIT} Mbit/s",
                        "s",
                        samples[method, count],
                        f"to 1 host by {method}",
                        samples[method, 1],
                        expected=EXPECTED[method] if count == 16 else None,
                        because=WHY[method],
                        budget=("ratio", "<=", 1.15) if is_last else None,
                        budget_from="stage to N hosts" if is_last else "",
                    )
                )
    found.append(
        Figure(
            "stage/one-host",
            f"{mib} MiB to one host by our unicast (what auto takes)",
            "s",
            samples["unicast", 1],
            "scp",
            samples["scp", 1],
            expected=1.1,
            because="an interpreter and three ssh more; hashing keeps up with the link",
            budget=("ratio", "<=", 1.1),
            budget_from="time(1) against a plain ssh copy",
        )
    )
    found.append(
        Figure(
            "stage/multicast/loss 1.0 %",
            f"multicast of {mib} MiB to {most} hosts, loss 1.0 %",
            "s",
            extra["loss 1.0 %"],
            "to 1 host without loss",
            samples["multicast", 1],
            expected=1.1,
            because="udpcast sends again what was lost",
        )
    )
    found.append(
        Figure(
            "stage/multicast/slow and killed",
            f"multicast of {large} MiB to {most} hosts, one slow, one killed: the healthy ones",
            "s",
            extra["slow and killed"],
            "to 1 host by multicast",
            extra["large to one"],
            expected=1.1,
            because="who is slow leaves, and who is dead is dropped, each after about 2 s",
            budget=("ratio", "<=", 1.15),
            budget_from="stage to N hosts",
        )
    )
    for transport in ("multicast", "chain", "unicast"):
        if extra.get(f"rate {transport}"):
            found.append(
                Figure(
                    f"stage/rate/{transport}",
                    f"sent by the sender in the middle of {transport}, by the limit",
                    "times",
                    extra[f"rate {transport}"],
                    expected=1.0,
                    because="udpcast counts raw bits; ssh adds little to what is paced",
                    budget=("value", "<=", 1.05),
                    budget_from="the rate limit is kept within 5 %",
                )
            )
    found.append(
        Figure(
            "stage/store-egress",
            f"read from the store for {most + 1} cold hosts, by the image's size",
            "times",
            extra["store"],
            expected=1.0,
            because="one host reads it, and sends what has come",
            budget=("value", "<=", 1.1),
            budget_from="store egress, whatever N",
        )
    )
    found.append(
        Figure(
            "stage/front-end-egress",
            "sent by the front-end meanwhile, by the image's size",
            "times",
            extra["front-end"],
            expected=0.01,
            because="plans, keys, answers",
        )
    )
    return found
