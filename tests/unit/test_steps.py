# SPDX-License-Identifier: Apache-2.0
"""Steps cross ssh as JSON: there and back they are the same, and anything else is no step."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semishared.errors import BadArguments
from semishared.host.service import read_plan
from semishared.model import steps as s
from semishared.model.disk.network_disk import NetworkDisk
from semishared.model.share import steps as share_steps
from semishared.model.share.share import BACKENDS, Share, Tree
from semishared.model.store import access, image_steps

SECRET = "00000000-0000-4000-8000-0000000000cc"
OF_IMAGES = {name: cls for name, cls in vars(image_steps).items() if getattr(cls, "__base__", None) is s.Step}
OF_SHARES = {name: cls for name, cls in vars(share_steps).items() if getattr(cls, "__base__", None) is s.Step}
STEPS = {**s.STEPS, **OF_IMAGES, **OF_SHARES}
words = st.text(max_size=20)
numbers = st.integers(0, 2**60)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(access.POOL, fullmatch=True)
accesses = st.builds(
    s.Access,
    st.just("rbd"),
    names,
    names,
    names,
    st.just("") | st.just("/etc/ceph/ceph.conf"),
    st.lists(names, max_size=3).map(tuple),
    st.just("") | st.just(SECRET),
    st.just("") | names,
    st.just(""),
    st.just(""),
    st.just(""),
    st.just(""),
)
formats, generations = st.sampled_from(["raw", "qcow2"]), st.from_regex(r"([0-9a-f]{32})?\Z", fullmatch=True)
images = st.builds(
    s.ImageRef, numbers, numbers, formats, st.just("one/one-7"), generations, access=accesses
) | st.builds(
    s.ImageRef,
    numbers,
    numbers,
    formats,
    words.map(lambda word: f"/{word}").filter(lambda path: ".." not in path and "\0" not in path),
    generations,
    access=st.just(s.Access()),
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": numbers,
    "str": words,
    "bool": st.booleans(),
    "Optional[int]": st.none() | numbers,
    "tuple[int, ...]": st.lists(numbers, max_size=3).map(tuple),
    "tuple[str, ...]": st.lists(words, max_size=3).map(tuple),
    "ImageRef": images,
    "DiskRef": st.builds(s.DiskRef, numbers, numbers, words),
    "Access": accesses,
    "NetworkDisk": st.just(NetworkDisk("one/one-7", ("mon:6789",), "libvirt", SECRET)),
    "dict[str, Any]": st.dictionaries(words, json_values, max_size=3),
    "dict[str, int]": st.dictionaries(words, numbers, max_size=3),
    "Tree": st.builds(
        Tree,
        st.sampled_from(sorted(BACKENDS)),
        st.just("/srv/shares"),
        words,
        st.just("fs/one"),
        words,
        words,
    ),
    "Share": st.builds(
        Share,
        numbers,
        numbers,
        numbers,
        numbers,
        numbers,
        numbers,
        words,
        st.sampled_from(["", "/srv/theirs"]),
    ),
    "Tuple[int, ...]": st.lists(numbers, max_size=3).map(tuple),
    "Tuple[str, ...]": st.lists(words, max_size=3).map(tuple),
}


def kinds(cls: Any) -> list[str]:
    """Return the types of a step's fields, as they are written."""
    return [cls.__annotations__[name] for name in cls._fields]


def steps_of(cls: Any) -> st.SearchStrategy[s.Step]:
    return st.builds(cls, *[VALUES[kind] for kind in kinds(cls)])


every_step = st.sampled_from(sorted(STEPS)).flatmap(lambda name: steps_of(STEPS[name]))


@given(every_step)
@settings(max_examples=500)
def test_every_step_is_the_same_after_its_way_through_json(step: s.Step) -> None:
    returned = s.from_data(json.loads(json.dumps(s.to_data(step))))
    assert (type(returned), returned) == (type(step), step)


@given(
    st.dictionaries(st.sampled_from(["step", "image", "disk", "vm", "vm_dir", "domain", "x"]), json_values)
)
def test_any_json_object_is_a_step_or_bad_arguments(data: dict[str, Any]) -> None:
    try:
        assert type(s.from_data(data)).__name__ in STEPS
    except BadArguments:
        pass


EXAMPLES: dict[str, Any] = {
    "int": 3,
    "str": "x",
    "bool": True,
    "tuple[str, ...]": ("x",),
    "tuple[int, ...]": (3,),
    "Optional[int]": 3,
    "ImageRef": s.ImageRef(100, 1, "raw", "/x"),
    "DiskRef": s.DiskRef(2, 1, "/x"),
    "Access": s.Access("rbd"),
    "NetworkDisk": NetworkDisk("one/one-7", (), "libvirt", SECRET),
    "dict[str, Any]": {"x": 1},
    "dict[str, int]": {"x": 1},
    "Tree": Tree("btrfs", "/srv/shares"),
    "Share": Share(1, 2, 3, 4),
    "Tuple[str, ...]": ("x",),
    "Tuple[int, ...]": (3,),
}


@pytest.mark.parametrize("cls", STEPS.values(), ids=STEPS)
def test_a_step_with_a_part_missing_or_added_is_none(cls: Any) -> None:
    whole = s.to_data(cls(*[EXAMPLES[kind] for kind in kinds(cls)]))
    parts = [{**whole, "more": 1}, {**whole, "step": "Nothing"}, {**whole, "step": ["PrepareVm"]}]
    parts += [{key: value for key, value in whole.items() if key != name} for name in whole]
    for name in ("image", "disk", "access", "network", "tree", "share"):
        if isinstance(whole.get(name), dict):
            parts += [{**whole, name: {}}, {**whole, name: None}, {**whole, name: {**whole[name], "x": 1}}]  # type: ignore[dict-item]
    for part in parts:
        with pytest.raises(BadArguments):
            s.from_data(part)


@pytest.mark.parametrize(
    "plan",
    [
        None,
        [],
        {},
        {"steps": {}},
        {"steps": [3], "seq": 1},
        {"steps": []},
        {"steps": [], "seq": "soon"},
        {"seq": 1},
    ],
)
def test_what_is_no_plan_is_bad_arguments(plan: object) -> None:
    with pytest.raises(BadArguments):
        read_plan(plan)
