# SPDX-License-Identifier: Apache-2.0
"""Tuples with named fields, as typing.NamedTuple makes them, but made in a tenth of the time.

The library compiles a function for each class and an expression for each field. A host side makes some
hundred classes, the vocabulary of plans, before its first step, and instances of few: that was a fifth of its
start.
"""

from __future__ import annotations

from operator import itemgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar, Dict, Iterator, Tuple, dataclass_transform
    from typing import NamedTuple as NamedTuple

    from typing_extensions import Self

    @dataclass_transform(frozen_default=True)
    class Named:
        """The same, and a class may add fields to those of the class that it is derived from."""

        _fields: ClassVar[Tuple[str, ...]]

        def _asdict(self) -> Dict[str, Any]: ...
        def _replace(self, **named: Any) -> Self: ...
        def __iter__(self) -> Iterator[Any]: ...
        def __getitem__(self, index: int) -> Any: ...

else:
    GETTERS = tuple(map(property, map(itemgetter, range(40))))
    """Of fields by their position: classes share them."""

    class Fields(type):
        """Makes the annotated names of a class body its fields, in order, with their values as defaults."""

        def __new__(kind, name, bases, body):
            body["__slots__"] = ()
            if bases != (tuple,):
                base, fields = bases[0], body.get("__annotations__", {})
                body["_fields"] = names = (*getattr(base, "_fields", ()), *fields)
                defaults = {field: body[field] for field in body.keys() & fields.keys()}
                body["_field_defaults"] = {**getattr(base, "_field_defaults", {}), **defaults}
                body.update(zip(names, GETTERS))
            return type.__new__(kind, name, bases, body)

    class NamedTuple(tuple, metaclass=Fields):
        """The base of all, with the documented methods of the library's."""

        def __new__(cls, *values, **named):
            if named or len(values) != len(cls._fields):
                given = {**cls._field_defaults, **dict(zip(cls._fields, values)), **named}
                twice = named.keys() & cls._fields[: len(values)]
                if twice or given.keys() != set(cls._fields) or len(values) > len(cls._fields):
                    raise TypeError(
                        f"{cls.__name__}({', '.join(cls._fields)}) made of {len(values)} values "
                        f"and {sorted(named)}"
                    )
                values = map(given.__getitem__, cls._fields)
            return tuple.__new__(cls, values)

        @classmethod
        def _make(cls, values):
            return cls(*values)

        def _asdict(self):
            return dict(zip(self._fields, self))

        def _replace(self, **named):
            return type(self)(**{**self._asdict(), **named})

        def __repr__(self):
            said = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self))
            return f"{type(self).__name__}({said})"

        def __getnewargs__(self):
            return tuple(self)

    Named = NamedTuple


def to_data(value: Any) -> Any:
    """Return named tuples, also within lists and objects, as JSON data: an object of the fields.

    A field that has its default is left out. `_` behind a name keeps it from being a word of Python's.
    """
    if hasattr(value, "to_data"):
        return value.to_data()
    if hasattr(value, "_fields"):
        defaults, fields = value._field_defaults, zip(value._fields, value)
        said = {name: one for name, one in fields if name not in defaults or one != defaults[name]}
        return {name.rstrip("_"): to_data(one) for name, one in said.items()}
    if isinstance(value, dict):
        return {name: to_data(one) for name, one in value.items()}
    return list(map(to_data, value)) if isinstance(value, (list, tuple)) else value
