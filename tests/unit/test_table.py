# SPDX-License-Identifier: Apache-2.0
"""The table of steps: each step has a function, of which every parameter is filled with what it is to be."""

from __future__ import annotations

import collections.abc
import functools
import importlib
import sys
import types
from pathlib import Path
from typing import (
    Any,
    Callable,
    Iterator,
    Mapping,
    NoReturn,
    Optional,
    Tuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import pytest

from semishared import model, store, table
from semishared.base import room
from semishared.front import datastore
from semishared.front.action import Action
from semishared.host import work as of_hosts
from semishared.model import shapes
from semishared.model.refs import Step, answer_of
from semishared.model.store import datastore_steps
from semishared.opennebula import args
from semishared.opennebula.xml import Datastore, Disk, Image, Vm
from semishared.plan.store.datastore import Asked
from semishared.store.dir.store import DirStore
from semishared.store.rbd.store import RbdStore
from semishared.vmm import on_host

HERE = Path(model.__file__).parent
VOCABULARIES = [
    importlib.import_module(f"semishared.model.{'.'.join(path.relative_to(HERE).with_suffix('').parts)}")
    for path in sorted(HERE.rglob("*steps.py"))
]
CLASSES = [
    cls
    for module in VOCABULARIES
    for cls in vars(module).values()
    if getattr(cls, "__module__", "") == module.__name__ and getattr(cls, "__base__", None) is Step
]
VOCABULARY: dict[str, Any] = {cls.__name__: cls for cls in CLASSES}
NAMES = {name: value for module in VOCABULARIES for name, value in vars(module).items()}
NAMES.update(room=room, Asked=Asked, Action=Action)
"""What modules name in annotations alone."""


def works(cls: Any) -> list[Any]:
    """Return the works in which a step is carried out."""
    if cls.__module__.endswith((".hypervisor_steps", ".live_steps")):
        return [on_host.Work]
    if cls.__module__ == datastore_steps.__name__:
        if cls.__name__ not in datastore_steps.__all__:
            return [datastore.Work]
        if table.STEPS[cls.__name__].startswith("."):
            return [datastore.Work, of_hosts.Work]
    return [of_hosts.Work]


of_types = pytest.mark.skipif(
    sys.version_info < (3, 10), reason="before Python 3.10 X | None cannot be evaluated"
)


@functools.cache
def parts(work: Any) -> dict[str, Any]:
    """Return the parts of a work, by name, with the type of each."""
    found = get_type_hints(work)
    for name, value in vars(work).items():
        if name in found:
            continue
        if isinstance(value, property):
            found[name] = get_type_hints(value.fget)["return"]
        elif isinstance(value, types.FunctionType) and not name.startswith("_"):
            *taken, returned = get_type_hints(value).values()
            code = value.__code__
            found[name] = Callable[taken if code.co_argcount - 1 == len(taken) else ..., returned]
    return found


@functools.cache
def functions(name: str) -> list[types.FunctionType]:
    """Return what carries out the steps of a name: of a store's verb what is promised, then each kind's."""
    row = table.STEPS[name]
    if not row.startswith("."):
        return [table.loaded(row)]  # type: ignore[list-item]
    return [getattr(kind, row[1:]) for kind in (store.Bridged, RbdStore, DirStore) if hasattr(kind, row[1:])]


def hints(function: types.FunctionType) -> dict[str, Any]:
    return get_type_hints(function, {**NAMES, **function.__globals__})


def fits(given: Any, wanted: Any) -> bool:
    """Tell whether what is given may be passed as what is wanted."""
    origin = get_origin(wanted)
    if wanted in (given, Any, object) or given == Any:
        return True
    if origin in (Union, types.UnionType):
        return all(
            any(fits(one, other) for other in get_args(wanted))
            for one in (get_args(given) if get_origin(given) in (Union, types.UnionType) else (given,))
        )
    if origin is collections.abc.Callable:
        if get_origin(given) is not origin:
            return False
        (took, returned), (takes, returns) = get_args(given), get_args(wanted)
        same = takes is ... or took is ... or all(fits(one, other) for one, other in zip(takes, took))
        return same and (returns is type(None) or fits(returned, returns))
    if origin in (collections.abc.Iterable, collections.abc.Sequence, collections.abc.Collection):
        some = (tuple, list, collections.abc.Iterator)
        return get_origin(given) in some and get_args(given)[0] == get_args(wanted)[0]
    return origin is not None and (get_origin(given), get_args(given)) == (origin, get_args(wanted))


@of_types
@pytest.mark.parametrize("name", table.ACTIONS)
def test_each_parameter_of_a_planner_is_filled(name: str) -> None:
    words, first, row = table.ACTIONS[name]
    shape, _, parse = words.partition(".")
    cls, planner = getattr(args, shape), table.loaded(row)
    assert parse.startswith("parse") and callable(getattr(cls, parse))
    assert not first or hasattr(get_type_hints(cls)[first], "host")
    wanted = hints(planner)  # type: ignore[arg-type]
    del wanted["return"]
    assert wanted.pop("asked", cls) is cls
    known = {
        "action": Action,
        "freeze": str,
        "options": str,
        "file_systems": Mapping[str, Tuple[str, ...]],
        "vm": Vm,
        "image": Image,
        "datastore": Datastore,
    }
    left = {one: kind for one, kind in wanted.items() if not fits({**known, "disk": Disk}.get(one), kind)}
    assert left.keys() <= {"is_taken_over"}, f"{row} needs {left}, which front/transfer.py does not ask for"
    assert len(left) <= len(planner.__defaults__ or ())


def test_each_step_has_one_row() -> None:
    assert len(CLASSES) == len(VOCABULARY), "two steps have one name"
    assert sorted(VOCABULARY) == list(table.STEPS)


def filled(name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each parameter that is filled, with the type of what it is given and the one that it wants."""
    cls = VOCABULARY[name]
    fields = get_type_hints(cls, NAMES)
    for function in functions(name):
        wanted, code = hints(function), function.__code__
        for parameter in code.co_varnames[: code.co_argcount]:
            if parameter == "step":
                yield parameter, cls, wanted[parameter]
            elif parameter in cls._fields:
                yield parameter, fields[parameter], wanted[parameter]
            else:
                for work in works(cls):
                    if parameter in parts(work):
                        yield parameter, parts(work)[parameter], wanted[parameter]


@of_types
@pytest.mark.parametrize("name", table.STEPS)
def test_what_a_function_is_given_is_what_it_takes(name: str) -> None:
    for parameter, given, wanted in filled(name):
        assert fits(given, wanted), f"{table.STEPS[name]}({parameter}: {wanted}) is given {given}"


FORMS = {"Count": int, "Any": Any, "Optional": Optional, "Union": Union}
FORMS.update((name.capitalize(), str) for name in shapes.FORMS if name.capitalize() not in FORMS)


@of_types
@pytest.mark.parametrize("name", table.STEPS)
def test_what_a_function_returns_is_the_answer_of_its_step(name: str) -> None:
    answer = answer_of(VOCABULARY[name])
    if isinstance(answer, str):
        answer = eval(answer, {**NAMES, **FORMS})
    for function in functions(name):
        returned = get_type_hints(function, {**NAMES, **function.__globals__})["return"]
        if returned is not NoReturn:
            assert fits(returned, type(None) if answer is None else answer), (
                f"{table.STEPS[name]} -> {returned}"
            )


LEFT = {"EvictBase": ["held"], "KeepSnapshot": ["fill", "check"], "ListBases": ["where"]}
"""Parameters that keep their default when a step comes to their function."""


@pytest.mark.parametrize("name", table.STEPS)
def test_each_parameter_of_a_function_is_filled(name: str) -> None:
    cls, row = VOCABULARY[name], table.STEPS[name]
    found = functions(name)
    for function in found:
        assert isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__"), (
            f"{row} is decorated: its parameters cannot be seen"
        )
        names = function.__code__.co_varnames[row.startswith(".") : function.__code__.co_argcount]
        for work in works(cls):
            own = {"step", *cls._fields, *parts(work)}
            left = [one for one in names if one not in own]
            assert left == LEFT.get(name, []), (
                f"{row} needs {left}, which neither {name} nor {work.__module__} has"
            )
        if row.startswith("."):
            assert set(cls._fields) - {"access"} <= set(names), f"{name} says more than {row} takes"
            promised = found[0].__code__
            assert names == promised.co_varnames[1 : promised.co_argcount]
    assert len(LEFT.get(name, [])) <= len(found[0].__defaults__ or ())


@of_types
def test_a_function_that_takes_something_else_is_found() -> None:
    assert fits(tuple[str, ...], collections.abc.Iterable[str]) and fits(str, str | None)
    assert not fits(str, int) and not fits(str | None, str) and not fits(tuple[int, ...], tuple[str, ...])
    assert not fits(Callable[[int], None], Callable[[str], None])


def test_a_step_at_a_vm_directory_says_of_which_vm() -> None:
    """By that a host judges what it finds there (disk/guard.py)."""
    bare = {name for name, cls in VOCABULARY.items() if "vm_dir" in cls._fields and "vm" not in cls._fields}
    of_actions = ("hypervisor_steps", "live_steps")
    there = {name for name in bare if not VOCABULARY[name].__module__.endswith(of_actions)}
    assert there == set()
