# SPDX-License-Identifier: Apache-2.0
"""Our named tuples do what those of the library do, field by field."""

from __future__ import annotations

import copy
import pickle
import re
import typing
from pathlib import Path

import pytest

from semishared.named import NamedTuple


class Ours(NamedTuple):
    """A base."""

    number: int
    name: str = "x"
    """A field may have words."""
    others: tuple[str, ...] = ()

    @property
    def twice(self) -> int:
        """Return it twice."""
        return self.number * 2

    @classmethod
    def of(cls, text: str) -> Ours:
        """Return it of a text."""
        return cls(int(text))


class Theirs(typing.NamedTuple):
    """A base."""

    number: int
    name: str = "x"
    others: tuple[str, ...] = ()


class Child(Ours):
    """With the fields of its parent."""


WORDS: list[tuple[tuple[object, ...], dict[str, object]]] = [
    ((1,), {}),
    ((1, "y"), {}),
    ((1, "y", ("z",)), {}),
    ((), {"number": 3}),
    ((1,), {"others": ("a",)}),
    ((), {"name": "n", "number": 2}),
]
REFUSED: list[tuple[tuple[object, ...], dict[str, object]]] = [
    ((), {}),
    ((1, "y", (), 4), {}),
    ((1,), {"number": 2}),
    ((1,), {"other": 2}),
    ((), {"name": "n"}),
    ((1, "y", (), 4), {"name": "n"}),
]


@pytest.mark.parametrize("values,named", WORDS)
def test_is_made_as_the_librarys_is(values: tuple[object, ...], named: dict[str, object]) -> None:
    ours, theirs = Ours(*values, **named), Theirs(*values, **named)  # type: ignore[arg-type]
    assert tuple(ours) == tuple(theirs)
    assert ours == theirs
    assert hash(ours) == hash(theirs)
    assert repr(ours) == repr(theirs).replace("Theirs", "Ours")
    assert ours._asdict() == theirs._asdict()
    assert list(ours._asdict()) == list(theirs._asdict())
    assert (ours.number, ours.name, ours.others) == (theirs.number, theirs.name, theirs.others)


@pytest.mark.parametrize("values,named", REFUSED)
@pytest.mark.parametrize("made", [Ours, Theirs])
def test_refuses_what_the_librarys_does(
    made: type, values: tuple[object, ...], named: dict[str, object]
) -> None:
    with pytest.raises(TypeError):
        made(*values, **named)


def test_says_its_fields() -> None:
    assert Ours._fields == Theirs._fields == ("number", "name", "others")
    assert Ours._field_defaults == Theirs._field_defaults == {"name": "x", "others": ()}
    assert Ours.__doc__ == "A base."


def test_cannot_be_changed() -> None:
    ours = Ours(1)
    for name in ("number", "anything"):
        with pytest.raises(AttributeError):
            setattr(ours, name, 2)
    assert not hasattr(ours, "__dict__")


def test_may_have_no_fields() -> None:
    class Nothing(NamedTuple):
        pass

    assert (Nothing._fields, Nothing(), repr(Nothing())) == ((), (), "Nothing()")
    with pytest.raises(TypeError):
        Nothing(1)  # type: ignore[call-arg]
    assert not hasattr(NamedTuple, "_fields"), (
        "the base of all has none: by that its classes are known from it (model/steps.py)"
    )


def test_methods_and_subclasses() -> None:
    assert Ours.of("4").twice == 8
    child = Child(1, name="c")
    assert (type(child), child.name, child._fields) == (Child, "c", Ours._fields)
    assert type(child._replace(number=2)) is Child
    assert type(Child._make([1, "m", ()])) is Child


def test_is_copied_and_pickled() -> None:
    ours = Ours(1, "y", ("z",))
    for copied in (copy.copy(ours), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert (type(copied), copied) == (Ours, ours)
    assert ours._replace(name="n") == Ours(1, "n", ("z",))
    with pytest.raises(TypeError):
        ours._replace(nothing=1)  # type: ignore[call-arg] # that is the test


def test_no_module_of_ours_makes_the_librarys() -> None:
    """What this is for: each of those costs every process that loads it a tenth of a millisecond."""
    for path in (Path(__file__).resolve().parents[2] / "lib").rglob("*.py"):
        # preflight.py goes to machines that have nothing of ours.
        if path.name not in ("named.py", "preflight.py"):
            assert "NamedTuple" not in "".join(re.findall(r"from typing import .*", path.read_text())), path
