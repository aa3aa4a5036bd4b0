"""Tables of which a record is a row of a dataclass, whose fields are the columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from simulator.base.errors import Fault
from simulator.formats.readers.csv_table import (
    Parser,
    header_names,
    integer_cell,
    number_cell,
    one_of,
    open_table,
    parse_record,
    repeated,
    text_cell,
)
from simulator.studies.backtest.rows import BadRow

RowT = TypeVar("RowT")
# The cells of a field by its type, if that has no words; a bandwidth or a count that may be 0 has a parser of its own
_OF_TYPE: Final[Mapping[str, Parser]] = {
    "str": text_cell,
    **dict.fromkeys(("int", "int | None"), integer_cell),
    **dict.fromkeys(("float", "float | None"), number_cell),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable(Generic[RowT]):
    """A table of which a wrong line costs that line alone. A record is row(line=…, **cells).

    signs: columns that no other table has. never_blank: columns of which every record has a value. unique: a record that
    repeats an earlier one's id is a BadRow. own: parsers of columns that are more than their field's type says.
    """

    row: type[RowT]
    signs: frozenset[str]
    required: Sequence[str]
    never_blank: Sequence[str]
    id_column: str
    own: Mapping[str, Parser]
    unique: bool = True

    @property
    def parsers(self) -> Mapping[str, Parser]:
        """Of every column."""
        types = get_type_hints(self.row)
        columns = (one for one in fields(cast("Any", self.row)) if one.name != "line")
        return {one.name: self.own.get(one.name) or self._of_type(one, types[one.name]) for one in columns}

    def _of_type(self, one: Field[Any], kind: object) -> Parser:
        """By a field's type: words are its own; a blank cell is its default, or none where it must not be blank."""
        words = tuple(
            word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)
        )
        if not words:
            return _OF_TYPE[str(one.type)]
        return one_of(*filter(None, words), blank=None if one.name in self.never_blank else one.default)

    def matches(self, path: str | Path) -> bool:
        """The file's first line names this table's own columns."""
        return self.signs <= set(header_names(Path(path)))

    def read(self, path: str | Path) -> Iterator[RowT | BadRow]:
        """The records in order; unreadable ones become a BadRow.

        path: a .csv, or the same compressed with gzip. Raises TableError if the file cannot be read, is empty, or has a
        header that lacks a required column or repeats one.
        """
        seen: dict[str, int] = {}
        parsers = self.parsers
        with open_table(Path(path), tuple(parsers), self.required, others=True) as (header, records):
            for record in records:
                values = parse_record(record, header, parsers, self.id_column)
                if isinstance(values, BadRow):
                    yield values
                    continue
                identity = str(values.get(self.id_column, ""))
                if blank := [column for column in self.never_blank if values[column] in ("", None)]:
                    places = (f"line {record.line}: {column}" for column in blank)
                    faults = tuple(Fault(place, "is blank", "a value") for place in places)
                    yield BadRow(line=record.line, id=identity, faults=faults)
                elif self.unique and identity in seen:
                    yield repeated(record.line, identity, seen[identity], self.id_column)
                else:
                    seen |= {identity: record.line} if self.unique else {}
                    yield cast("Callable[..., RowT]", self.row)(line=record.line, **values)
