"""The enrich step: values of keys of the state store, and datasets (a JSON array, or one object per line) by fields.

Workers look up the distinct keys of each Arrow batch. A dataset is indexed in the worker, and a row gets only its
object: a copy of the dataset for each row would need the size of the dataset times 10,000.

An as-of join looks up the value that a key had at the time of the row, in the changes that the driver has read before
the batch (``state_dir.changes``). Workers have them in memory.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import BinaryType, StringType, StructField, StructType, TimestampNTZType, TimestampType

from penstock.errors import ConfigError, PenstockError, UnavailableError
from penstock.pipelines.rows import alive, key_column, mark_dead, reference, references
from penstock.pipelines.spec.steps import LOOKUP_DATASETS, Enrich
from penstock.pipelines.spec.values import duration_ms
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.changes import (
    KNOWN_CHANGES,
    KeyHistory,
    Version,
    VisibleChanges,
    history_in,
    history_of,
)
from penstock.pipelines.steps.arrow_functions import arrow_function
from penstock.pipelines.steps.parsing import from_json, schema_of
from penstock.spark.files.object_storage import StoragePath, absolute_path
from penstock.spark.option_parsing import json_value
from penstock.spark.statestore.lookup import read_values

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "MISSING",
    "NOT_JSON",
    "TOO_LARGE",
    "UNAVAILABLE",
    "UNKNOWN",
    "DatasetIndex",
    "GetHistory",
    "GetValues",
    "Lookup",
    "LookupResult",
    "WithLookup",
    "enrich_step",
    "index_dataset",
    "look_up_keys",
    "lookup_with",
    "store_lookup",
    "text_of",
    "values_at",
]


class Lookup(NamedTuple):
    """Lookup of an enrich step: adds a column with the values of the keys in another column.

    ``into`` becomes a struct: value (binary), and if the value is missing for a reason, code and reason. With
    ``fields`` the value of the key is a dataset, and the lookup selects the object whose fields equal ``columns``.
    """

    key: str
    into: str
    refresh_ms: int
    fields: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    missing: str = "pass"
    unavailable: str = "fail"
    wait_ms: int = 30_000
    time: str = ""
    """Column with a time in ms since 1970; the lookup returns the value at this time, from the changes ``history``."""
    history: str = ""


WithLookup = Callable[[DataFrame, Lookup], DataFrame]
"""Function that adds the column of a lookup to rows."""


def enrich_step(rows: DataFrame, name: str, enrich: Enrich, with_lookup: WithLookup) -> DataFrame:
    """Add the values of the keys in ``enrich.key`` as a struct column ``enrich.into``; failures become dead rows."""
    schema = schema_of(name, enrich.columns)
    keyed = rows.withColumn("_key", sf.when(alive(), key_column(rows, enrich.key)))
    matched = references(rows, list(enrich.match.values()))
    lookup = Lookup(
        "_key",
        "_found",
        duration_ms(enrich.refresh),
        tuple(enrich.match),
        tuple(matched),
        enrich.missing,
        enrich.unavailable,
        duration_ms(enrich.wait),
    )
    if enrich.as_of is not None:
        keyed = keyed.withColumn("_at", _milliseconds(rows, name, enrich.as_of.time))
        lookup = lookup._replace(time="_at", history=history_of(name, enrich))
    found = with_lookup(keyed, lookup)
    with_value = found.withColumn("_json", from_json(sf.col("_found.value").cast("string"), schema))
    failures = [("lookup.key", sf.when(~sf.is_valid_utf8("_key"), sf.lit("the key is not UTF-8")))]
    failures += [
        (code, sf.when(sf.col("_found.code") == code, sf.col("_found.reason")))
        for code in (UNAVAILABLE, NOT_JSON, *([TOO_LARGE, MISSING] if enrich.as_of is not None else []))
    ]
    failures.append(
        (
            "lookup.not_json",
            sf.when(sf.col("_json._corrupt").isNotNull(), sf.format_string("the value of key %s is not JSON", "_key")),
        )
    )
    if enrich.missing == "dead_letter" and enrich.as_of is None:
        reason = sf.format_string("the state store has no key %s", "_key")
        if enrich.match:
            texts = [
                sf.format_string(f"{_format_escaped(field)} %s", column)
                for field, column in zip(enrich.match, matched, strict=True)
            ]
            reason = sf.concat(sf.format_string("nothing under key %s has ", "_key"), sf.concat_ws(", ", *texts))
        nothing = sf.col("_found.value").isNull()
        if enrich.unavailable == "pass":
            # An unknown value is not a missing one.
            nothing = nothing & (sf.coalesce(sf.col("_found.code"), sf.lit("")) != "lookup.unknown")
        failures.append(("lookup.missing", sf.when(nothing, reason)))
    marked = mark_dead(with_value, name, failures)
    value = sf.when(sf.col("_json").isNotNull(), sf.col("_json").dropFields("_corrupt"))
    return marked.withColumn(enrich.into, value).drop("_key", "_at", "_found", "_json")


def _milliseconds(rows: DataFrame, step: str, name: str) -> Column:
    """Return the event time in the column ``name`` in ms since 1970."""
    column = reference(rows, name)
    kind = rows.select(column).schema.fields[0].dataType
    if not isinstance(kind, TimestampType | TimestampNTZType):
        raise ConfigError(
            f"step {step!r}: the column {name!r} is {kind.simpleString()}",
            option="as_of.time",
            why="an as-of join compares times",
            hint=f"use a column of type TIMESTAMP, or compute one in a map step: CAST({column} AS TIMESTAMP)",
        )
    return sf.unix_millis(sf.col(column).cast("timestamp"))


def _format_escaped(text: str) -> str:
    """Escape ``text`` for a format string."""
    return text.replace("%", "%%")


DatasetIndex = dict[tuple[str, ...], bytes]
"""Maps the values of the matched fields, as text, to the JSON of the object."""


def index_dataset(data: bytes, fields: Sequence[str]) -> DatasetIndex:
    """Index the objects in ``data`` by the values of ``fields``, compared as text (``text_of``).

    The last of several objects with equal fields is used; objects without a field, or with null, are not indexed.

    Raises:
        ValueError: neither a JSON array of objects nor one JSON object per line, or a duplicate name in an object.
    """
    made: DatasetIndex = {}
    for found, text in _objects(data):
        values = [text_of(found.get(field)) for field in fields]
        named = tuple(value for value in values if value is not None)
        if len(named) == len(fields):
            made[named] = text
    return made


def text_of(value: object) -> str | None:
    """Convert a JSON scalar to text as Spark does: 5, 5.0, 1.0E7, true. None (never matches): null, object, array."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _double_text(value)
    return str(value) if isinstance(value, str | int) else None


def _double_text(value: float) -> str:
    """Return ``value`` as Java does: with an exponent unless it is 0, or from 0.001 to 10 million."""
    if value == 0 or 1e-3 <= abs(value) < 1e7 or math.isinf(value):
        return str(value).replace("inf", "Infinity")
    sign, digits, exponent = Decimal(str(value)).as_tuple()
    assert isinstance(exponent, int), "the number is finite"
    rest = "".join(map(str, digits[1:])).rstrip("0") or "0"
    return f"{'-' * sign}{digits[0]}.{rest}E{len(digits) - 1 + exponent}"


def _objects(data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    if data.lstrip()[:1] == b"[":
        text = data.decode()
        end = text.index("[") + 1
        for each in _object_list(text):
            start = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]  # it matches nothing as well
            # The text of the object, and not `each` encoded again: a float has fewer digits than a DECIMAL.
            _, end = _DECODER.raw_decode(text, start)
            yield each, text[start:end].encode()
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            found = json_value(line.decode())
            if not isinstance(found, dict):
                raise ValueError(f"line {number} is not a JSON object")
            yield found, line


_BETWEEN = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder()


def _object_list(text: str) -> list[dict[str, Any]]:
    found = json_value(text)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError("not an array of JSON objects")
    return found


UNAVAILABLE = "lookup.unavailable"
NOT_JSON = "lookup.not_json"
MISSING = "lookup.missing"
TOO_LARGE = "lookup.too_large"
UNKNOWN = "lookup.unknown"
"""Code for a store that did not answer; the step continues without the value."""
_RESULT = StructType(
    [StructField("value", BinaryType()), StructField("code", StringType()), StructField("reason", StringType())]
)
_MOST_VALUES = 100_000
_MOST_BYTES = (1 << 31) - 1
"""Maximum size of a column of an Arrow batch."""

LookupResult = tuple[bytes | None, str | None, str | None]
"""Value, code and reason: either a value, or the code and reason of a failure; all None if the key is missing."""

_indexes: dict[tuple[int, str, str, tuple[str, ...]], tuple[bytes, DatasetIndex]] = {}
"""Datasets of a worker with the bytes they were built from; they are indexed again only if the bytes change."""

_json: set[int] = set()
"""Hashes of values in a worker that are valid JSON."""

GetValues = Callable[[Collection[str], Lookup], Mapping[str, bytes | None]]
"""Function from distinct keys to their values; a missing key has None, or no entry."""


GetHistory = Callable[[str], tuple[KeyHistory, VisibleChanges | None]]
"""Function that returns the changes with a name, and which of them this batch knows; None: all."""


def store_lookup(broker: str, state: StoragePath) -> WithLookup:
    """Return the lookup function of enrich steps for the state store at ``broker``.

    As-of joins read the changes in the state directory ``state``.
    """

    def get(keys: Collection[str], lookup: Lookup) -> dict[str, bytes | None]:
        encoded = {key: key.encode() for key in keys}
        found = read_values(encoded.values(), broker, refresh_ms=lookup.refresh_ms, timeout_ms=lookup.wait_ms)
        return {key: found[name] for key, name in encoded.items()}

    directory = absolute_path(state)
    return lookup_with(get, broker, partial(_known_history, directory))


def _known_history(state: StoragePath, name: str) -> tuple[KeyHistory, VisibleChanges]:
    """Return the changes ``name`` and which of them the batch of this task knows."""
    from pyspark import TaskContext

    context = TaskContext.get()
    text = None if context is None else context.getLocalProperty(KNOWN_CHANGES)
    assert text is not None, "the driver sets it before it starts a job"
    known = VisibleChanges.from_data(json.loads(text)[name])
    return history_in(layout.changes(state, name), known), known


def lookup_with(get: GetValues, name: str, history: GetHistory) -> WithLookup:
    """Return the lookup function of enrich steps with ``get`` and ``history``, which run in workers; ``name``
    identifies the data of ``get``."""

    def look_up_at(rows: DataFrame, lookup: Lookup) -> DataFrame:
        def look(keys: pa.Array[Any], times: pa.Array[Any]) -> pa.Array[Any]:
            found = values_at(*history(lookup.history), lookup, keys.to_pylist(), times.to_pylist())
            return _as_array(found)

        function = arrow_function(look, _RESULT)
        return rows.withColumn(lookup.into, function(_utf8(sf.col(lookup.key)), sf.col(lookup.time)))

    def look_up(rows: DataFrame, lookup: Lookup) -> DataFrame:
        def look(keys: pa.Array[Any], wanted: pa.Array[Any]) -> pa.Array[Any]:
            texts = [None if key is None else str(key) for key in keys.to_pylist()]
            values: list[Any] = wanted.to_pylist()
            return _as_array(look_up_keys(get, name, lookup, texts, values))

        function = arrow_function(look, _RESULT)
        columns = [_utf8(sf.col(column).cast("string")) for column in lookup.columns]
        wanted = sf.array(*columns) if columns else sf.expr("CAST(array() AS array<string>)")
        return rows.withColumn(lookup.into, function(_utf8(sf.col(lookup.key)), wanted))

    return lambda rows, lookup: look_up_at(rows, lookup) if lookup.time else look_up(rows, lookup)


def _utf8(text: Column) -> Column:
    """Return ``text``, or null if it is not UTF-8, as Spark may have: Python could not decode it."""
    return sf.when(sf.is_valid_utf8(text), text)


def _as_array(found: Sequence[LookupResult]) -> pa.Array[Any]:
    import pyarrow as pa

    _check_size(found)
    # Built by column: a dictionary for each row would cost more than the lookup.
    fields = [
        pa.array([each[place] for each in found], kind)
        for place, kind in enumerate((pa.binary(), pa.string(), pa.string()))
    ]
    return pa.StructArray.from_arrays(fields, ["value", "code", "reason"])


def values_at(
    history: KeyHistory, known: VisibleChanges | None, lookup: Lookup, keys: list[str | None], times: list[int | None]
) -> list[LookupResult]:
    """Return the value of each of ``keys`` at the time of the row, in ms since 1970, from the ``known`` changes.

    Raises:
        PenstockError: a key has no value at this time, and the step's policy is to fail.
    """
    floor_ms = history.floor_ms if known is None else max(known.floor_ms, history.floor_ms)
    found: list[LookupResult] = []
    for key, time_ms in zip(keys, times, strict=True):
        if key is None:
            found.append(_NOTHING)
            continue
        version = None
        if time_ms is not None and time_ms >= floor_ms:
            version = history.at(key.encode(), time_ms, known)
        if version is not None and version.value is not None:
            is_json = _is_json(version.value)
            found.append((version.value, None, None) if is_json else (None, NOT_JSON, _not_json(key)))
        elif version is not None and version.omitted is not None:
            reason = f"the value of key {key} has {version.omitted} bytes, too many for the topic with the changes"
            found.append((None, TOO_LARGE, reason))
        else:
            reason = _why_missing(history, key, time_ms, version, floor_ms)
            if lookup.missing == "fail":
                raise PenstockError(reason, why="the enrich step has `missing: fail`", hint=_MISSING_REMEDY)
            found.append((None, MISSING, reason) if lookup.missing == "dead_letter" else _NOTHING)
    return found


def _why_missing(history: KeyHistory, key: str, time_ms: int | None, version: Version | None, floor_ms: int) -> str:
    """Return why ``key`` has no value at ``time_ms``."""
    if time_ms is None:
        return f"the value of key {key} is unknown: the event time is null"
    if version is not None:
        return f"the state store had no key {key} at {_time(time_ms)}: it was deleted at {_time(version.time_ms)}"
    if time_ms < floor_ms:
        return f"the value of key {key} at {_time(time_ms)} is unknown: the history begins at {_time(floor_ms)}"
    if time_ms < history.begin_ms:
        begin = _time(history.begin_ms)
        return f"the value of key {key} at {_time(time_ms)} is unknown: the topic with the changes begins at {begin}"
    return f"the state store had no key {key} at {_time(time_ms)}"


def _time(time_ms: int) -> str:
    try:
        text = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError):
        return f"{time_ms} ms since 1970"
    return text.replace("+00:00", "Z")


def look_up_keys(
    get: GetValues, name: str, lookup: Lookup, keys: list[str | None], wanted: list[list[str | None]]
) -> list[LookupResult]:
    """Look up ``keys``: return the value of each, or with ``lookup.fields`` the object whose fields equal ``wanted``.

    Raises:
        UnavailableError: the store did not answer in time and the step's policy is to fail.
        PenstockError: a key does not exist and the step's policy is to fail.
    """
    distinct = list(dict.fromkeys(key for key in keys if key is not None))
    try:
        values = get(distinct, lookup) if distinct else {}
    except UnavailableError as error:
        if lookup.unavailable == "fail":
            raise
        code = UNAVAILABLE if lookup.unavailable == "dead_letter" else UNKNOWN
        return [_NOTHING if key is None else (None, code, error.what) for key in keys]
    by_key = {key: _result_or_index(name, lookup.fields, key, values.get(key)) for key in distinct}
    found = [
        _NOTHING if key is None else _row_result(by_key[key], each) for key, each in zip(keys, wanted, strict=True)
    ]
    if lookup.missing == "fail":
        _fail_where_missing(lookup, keys, wanted, found)
    return found


_NOTHING: LookupResult = (None, None, None)
_MISSING_REMEDY = "set the key and start the pipeline again, or use `missing: pass` or `missing: dead_letter`"


def _result_or_index(store: str, fields: tuple[str, ...], key: str, value: bytes | None) -> LookupResult | DatasetIndex:
    """Return the result for all rows with ``key``, or the dataset with the objects for them."""
    if value is None:
        return _NOTHING
    if not fields:
        return (value, None, None) if _is_json(value) else (None, NOT_JSON, _not_json(key))
    try:
        return _index_of(store, key, fields, value)
    except ValueError as error:
        return None, NOT_JSON, f"the dataset under key {key} cannot be read: {error}"


def _row_result(found: LookupResult | DatasetIndex, wanted: list[str | None]) -> LookupResult:
    if isinstance(found, tuple):
        return found
    named = tuple(text for text in wanted if text is not None)
    return found.get(named) if len(named) == len(wanted) else None, None, None


def _check_size(found: Sequence[LookupResult]) -> None:
    size = sum(len(value) for value, _, _ in found if value is not None)
    if size > _MOST_BYTES:
        raise PenstockError(
            f"an enrich step adds {size} bytes to {len(found)} rows; the maximum is {_MOST_BYTES} bytes",
            why="without match, each row gets a copy of the whole value of its key",
            hint="select one object of a large value with match, or set spark.sql.execution.arrow.maxRecordsPerBatch "
            "(default 10000) to a smaller number",
        )


def _not_json(key: str) -> str:
    return f"the value of key {key} is not JSON"


def _is_json(value: bytes) -> bool:
    """Return True for exactly one JSON value without duplicate names, of which Spark would use the last one.

    Results are cached, since this is called for each row.
    """
    known = hash(value)
    if known in _json:
        return True
    try:
        json_value(value.decode())
    except ValueError:
        return False
    if len(_json) >= _MOST_VALUES:
        _json.clear()
    _json.add(known)
    return True


def _index_of(store: str, key: str, fields: tuple[str, ...], data: bytes) -> DatasetIndex:
    name = (os.getpid(), store, key, fields)
    kept = _indexes.get(name)
    if kept is None or kept[0] != data:
        _indexes.pop(name, None)
        kept = _indexes[name] = (data, index_dataset(data, fields))
        while len(_indexes) > LOOKUP_DATASETS:
            del _indexes[next(iter(_indexes))]
    return kept[1]


def _fail_where_missing(
    lookup: Lookup, keys: list[str | None], wanted: list[list[str | None]], found: list[LookupResult]
) -> None:
    for key, each, (value, code, _) in zip(keys, wanted, found, strict=True):
        if key is not None and value is None and code is None:
            what = f"the state store has no key {key!r}"
            if lookup.fields:
                named = ", ".join(f"{field} {text!r}" for field, text in zip(lookup.fields, each, strict=True))
                what = f"nothing under key {key!r} has {named}"
            raise PenstockError(
                what,
                why="the enrich step has `missing: fail`",
                hint=_MISSING_REMEDY,
            )
