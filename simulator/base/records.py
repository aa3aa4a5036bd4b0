"""Records inside a record, and the flat names by which their fields are known too.

A plan is written `[plan.pipeline] virtual_stages = 4`, and was once written `virtual_stages = 4` in `[plan]`. Flags, tables,
journals and reports keep that flat name, so both are read, and what is written out as plain data is flat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Self

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic.fields import FieldInfo

from simulator.base.schema import Strict


class Nested(Strict):
    """Base of models whose fields are grouped in records.

    flat_names: flat name -> where the field is, of every field, in the order of reports: {"tp": "tp", "schedule":
    "pipeline.schedule"}. A flat name that is a record's name too is the record's main field: `precision = "fp8"`.
    """

    flat_names: ClassVar[Mapping[str, str]] = {}
    _moved: ClassVar[dict[str, tuple[str, str]]] = {}  # flat name -> record, field
    _flat: ClassVar[dict[tuple[str, str], str]] = {}
    _fields: ClassVar[dict[str, FieldInfo]] = {}
    _rank: ClassVar[dict[str, int]] = {}
    # Fields and their defaults; of a record, flat name, field and default of each of its own
    _usual: ClassVar[tuple[tuple[str, Any, tuple[tuple[str, str, Any], ...]], ...]] = ()
    _records: ClassVar[frozenset[str]] = frozenset()
    _required: ClassVar[tuple[str, ...]] = ()  # records that have no default

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        pairs = {name: path.partition(".") for name, path in cls.flat_names.items()}
        cls._moved = {name: (record, field) for name, (record, _, field) in pairs.items() if field}
        cls._flat = {place: name for name, place in cls._moved.items()}
        cls._rank = {name: number for number, name in enumerate(cls.flat_names)}
        cls._fields = {name: cls._field(path) for name, path in cls.flat_names.items()}
        cls._usual = tuple((name, info.default, cls._inside(name)) for name, info in cls.model_fields.items())
        cls._records = frozenset(record for record, _ in cls._moved.values())
        cls._required = tuple(
            name for name, info in cls.model_fields.items() if name in cls._records and info.is_required()
        )

    @model_validator(mode="before")
    @classmethod
    def _into_records(cls, data: object) -> object:
        """Flat keys are put into their records."""
        if type(data) is not dict:
            return data
        moved = cls._moved
        found: dict[str, Any] = {}
        placed: dict[str, dict[str, Any]] = {name: {} for name in cls._required}
        for key, value in data.items():
            place = moved.get(key)
            if place is None or (key == place[0] and isinstance(value, dict | BaseModel)):
                found[key] = value
            elif place[0] in placed:
                placed[place[0]][place[1]] = value
            else:
                placed[place[0]] = {place[1]: value}
        for record, fields in placed.items():
            found[record] = _joined(record, found[record], fields, cls._flat) if record in found else fields
        return found

    @model_serializer(mode="wrap")
    def _as_flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in handler(self).items():
            if name in self._records:
                found |= {self._flat[name, field]: one for field, one in value.items()}
            else:
                found[name] = value
        return {name: found[name] for name in sorted(found, key=self._rank.__getitem__)}

    def changed_fields(self) -> dict[str, Any]:
        """The fields that are not at their default, by flat name in the order of reports, as plain data.

        What `model_dump(mode="json", exclude_defaults=True)` gives, several times as fast: a search asks for it of each plan.
        """
        found: dict[str, Any] = {}
        values = self.__dict__
        for name, default, inside in self._usual:
            value = values[name]
            if value is default or value == default:
                continue
            if not inside:
                found[name] = _plain(value)
                continue
            fields = value.__dict__
            for flat, field, usual in inside:
                if (one := fields[field]) != usual:
                    found[flat] = _plain(one)
        return {name: found[name] for name in sorted(found, key=self._rank.__getitem__)}

    @classmethod
    def flat_fields(cls) -> dict[str, FieldInfo]:
        """The fields by flat name, in the order of reports."""
        return cls._fields

    @classmethod
    def written_fields(cls) -> Mapping[str, FieldInfo]:
        """Every key that may be written: flat names and records."""
        return {**cls.model_fields, **cls._fields}

    @classmethod
    def _inside(cls, record: str) -> tuple[tuple[str, str, Any], ...]:
        """Flat name, field and default of a record's fields."""
        places = ((flat, field) for flat, (owner, field) in cls._moved.items() if owner == record)
        return tuple((flat, field, cls._fields[flat].default) for flat, field in places)

    @classmethod
    def _field(cls, path: str) -> FieldInfo:
        record, _, field = path.partition(".")
        info = cls.model_fields[record]
        inner = info.annotation
        return inner.model_fields[field] if field and isinstance(inner, type) and issubclass(inner, BaseModel) else info

    @property
    def flat_fields_set(self) -> frozenset[str]:
        """Flat names of the fields that were set explicitly."""
        found: set[str] = set()
        for name in self.model_fields_set:
            inner = getattr(self, name)
            if name in self._records:
                found.update(self._flat[name, field] for field in inner.model_fields_set)
            else:
                found.add(name)
        return frozenset(found)

    def value(self, name: str) -> Any:  # noqa: ANN401  of any field
        """The field of that flat name, or a record, or of a path of keys that begins with one."""
        first, *rest = name.split(".")
        return attrgetter(".".join((self.flat_names.get(first, first), *rest)))(self)

    def copy_with(self, **changes: Any) -> Self:  # noqa: ANN401  of any field
        """A copy in which the fields of these flat names differ. They are not validated."""
        return self.model_copy(update=changes)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's; flat names are put into their records."""
        moved = self._moved
        if update is None or moved.keys().isdisjoint(update):
            return super().model_copy(update=update, deep=deep)
        found: dict[str, Any] = {}
        placed: dict[str, dict[str, Any]] = {}
        for name, value in update.items():
            place = moved.get(name)
            if place is None or (name == place[0] and isinstance(value, BaseModel)):
                found[name] = value
            else:
                placed.setdefault(place[0], {})[place[1]] = value
        for record, fields in placed.items():
            base: BaseModel = found.get(record, self.__dict__[record])
            found[record] = base.model_copy(update=fields)
        return super().model_copy(update=found, deep=deep)

    @classmethod
    def flat_path(cls, path: Sequence[Any]) -> tuple[Any, ...]:
        """A path of keys with the flat name for a record and its field; any other path as it is."""
        known = cls._flat.get((str(path[0]), str(path[1]))) if len(path) > 1 else None
        return tuple(path) if known is None else (known, *path[2:])

    @classmethod
    def flattened(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """A written table with flat names; a record stays that has keys unknown to it or given flat too."""
        found: dict[str, Any] = {}
        for key, value in data.items():
            fields = (
                {cls._flat.get((key, str(name))): one for name, one in value.items()} if isinstance(value, dict) else {}
            )
            clash = None in fields or any(name in data and name != key for name in fields)
            if not fields or clash:
                found[key] = value
            else:
                found |= {str(name): one for name, one in fields.items()}
        return found

    @classmethod
    def in_records(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Nested data in a file's current format: plain fields first, then records; a record with only its main field is written as that field."""
        given = Counter(cls._moved[name][0] for name in data if name in cls._moved)
        flat = {name for name in data if name not in cls._moved or (cls.is_main(name) and given[name] == 1)}
        found = {name: value for name, value in data.items() if name in flat}
        for name, value in data.items():
            if name not in flat:
                record, field = cls._moved[name]
                found.setdefault(record, {})[field] = value
        return found

    @classmethod
    def is_main(cls, name: str) -> bool:
        """A name of both a record and its main field."""
        return name in cls._records and name in cls._moved

    @classmethod
    def spelled(cls, name: str, data: Mapping[str, Any]) -> str:
        """A flat name as a table spells it: with its record, if it has one."""
        record, field = cls._moved.get(name, (name, ""))
        table = data.get(record)
        return f"{record}.{field}" if field and isinstance(table, dict) and field in table else name

    @classmethod
    def moved_keys(cls, data: Mapping[str, Any]) -> dict[str, str]:
        """Flat keys of a written table that have moved, and where to. A main field may stay: `precision = "fp8"`."""
        return {key: ".".join(cls._moved[key]) for key in data if key in cls._moved and key != cls._moved[key][0]}

    @classmethod
    def moved_note(cls, file: str, data: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
        """A line that names the flat keys of a file and where they are now; nothing where it has none."""
        moved = [f"{prefix}{old} is now {prefix}{new}" for old, new in cls.moved_keys(data).items()]
        return (f"{file}: {', '.join(moved)}; both are read",) if moved else ()


def _plain(value: Any) -> Any:  # noqa: ANN401  any field's
    """A value as JSON; of a record, the fields that are not at their default."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    return list(value) if isinstance(value, tuple) else value


def _joined(record: str, given: Any, fields: dict[str, Any], flat: Mapping[tuple[str, str], str]) -> dict[str, Any]:  # noqa: ANN401
    """A record that is given in part by itself and in part by flat keys. Raises ValueError where both say one thing."""
    inner = {name: getattr(given, name) for name in given.model_fields_set} if isinstance(given, BaseModel) else given
    if not isinstance(inner, dict):
        raise ValueError(f"{record} is not a table")  # noqa: TRY004  pydantic turns it into a fault
    if twice := [name for name in fields if name in inner]:
        name = twice[0]
        raise ValueError(f"{flat[record, name]} and {record}.{name} are one field: keep one")
    return {**inner, **fields}
