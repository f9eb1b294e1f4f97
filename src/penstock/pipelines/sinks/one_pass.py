"""Write the rows and the dead letters of a batch, for one sink or several, and count them, in one pass over the batch.

The tasks of one Spark job write Parquet files with pyarrow and return names and counts; the driver commits the files
(``table``), or reads them to send them elsewhere.

Counting, writing rows and writing dead letters as three jobs would need the batch in Spark's cache, which costs more
than all other work on a row, or would compute it three times, which is not possible for a batch with a dedupe.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    MapType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from penstock.pipelines.rows import ALIVE
from penstock.pipelines.sinks.parquet import SPARKS_SCHEMA, FileTarget, FileWriter
from penstock.pipelines.sinks.partitions import PartitionFiles
from penstock.pipelines.steps.arrow_functions import map_in_arrow
from penstock.pipelines.steps.expressions import quoted
from penstock.spark.files.object_storage import StoragePath

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "RECORD",
    "SHARED",
    "Outcomes",
    "PassResult",
    "WrittenFiles",
    "flattened",
    "is_supported",
    "outcome",
    "outcome_column",
    "start_worker",
    "structure",
    "type_of_rows",
    "write_in_one_pass",
]

_SIMPLE = (BinaryType, BooleanType, DateType, NumericType, DecimalType, TimestampNTZType, TimestampType)
_RESULT = (
    "sink LONG, out LONG, dead LONG, filtered LONG, exploded LONG, letters LONG, rows_files STRING, "
    "letters_files STRING, letters_steps STRING, checks STRING"
)


class WrittenFiles(NamedTuple):
    """Files of one table in the directory ``attempt``, not committed yet, and their number of rows."""

    attempt: StoragePath
    names: tuple[str, ...]
    rows: int


class PassResult(NamedTuple):
    """Counts of a batch by state, and the files of its rows and of its dead letters; None without a directory.

    ``checks``: number of rows for each name in the column ``_checks``; ``exploded``: rows that explode steps added;
    ``letters_by_step``: number of dead letters for each step that rejected them.
    """

    out: int
    dead: int
    filtered: int
    exploded: int
    rows: WrittenFiles
    letters: WrittenFiles | None
    checks: Mapping[str, int]
    letters_by_step: Mapping[str, int]


def is_supported(kind: DataType) -> bool:
    """Return True if a Parquet file of pyarrow and one of Spark have the same contents for columns of type ``kind``."""
    if isinstance(kind, StructType):
        return bool(kind.fields) and all(is_supported(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return is_supported(kind.elementType)
    if isinstance(kind, MapType):
        return is_supported(kind.keyType) and is_supported(kind.valueType)
    # A string with a collation has another type.
    return isinstance(kind, _SIMPLE) or kind == StringType()


SHARED = "column:"
"""Prefix of the columns of a batch that several sinks write unchanged, before their names."""
RECORD = "record"
"""Column with the columns of dead letters that are equal in all sinks, for :func:`flattened`."""
_ALIVE, _DEAD, _FILTERED = range(3)
"""States of a row in a sink."""
_LETTERS, _SINK = "letters", "sink"


def outcome_column(n: int) -> str:
    """Return the name of the column with the outcomes of sink ``n``, for :func:`flattened`."""
    return f"s{n}"


def outcome(
    own: Mapping[str, str],
    letter: Mapping[str, str],
    is_letter: str,
    counted: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return in SQL what becomes of a row in a sink, as a struct: ``state``, ``letter`` and ``row``.

    All arguments are in SQL, columns by name. ``row`` has the columns ``own`` that only this sink writes, and does not
    exist if there are none. ``letter`` has the columns of a dead letter that are not in ``RECORD``, is null if not
    ``is_letter``, and does not exist if the sink writes no letters (no columns ``letter``). ``counted`` are further
    fields, which only exist if a step makes them: ``checks``, the row's column ``_checks``, and ``more``, the rows that
    explode steps added.
    """
    state = f"CASE WHEN _dead IS NOT NULL THEN {_DEAD} WHEN _filtered IS NOT NULL THEN {_FILTERED} ELSE {_ALIVE} END"
    fields = {"state": f"CAST({state} AS TINYINT)", **counted}
    if letter:
        fields["letter"] = f"CASE WHEN {is_letter} THEN {structure(letter)} END"
    if own:
        fields["row"] = f"CASE WHEN {ALIVE} THEN {structure(own)} END"
    return structure(fields)


def structure(fields: Mapping[str, str]) -> str:
    """Return a struct in SQL with ``fields``, by name."""
    return f"struct({', '.join(f'{value} AS {quoted(name)}' for name, value in fields.items())})"


def flattened(rows: DataFrame, count: int) -> DataFrame:
    """Return ``rows`` as :func:`write_in_one_pass` reads them, for ``count`` sinks.

    ``rows`` have the shared columns, an outcome for each sink (``outcome_column``), and ``RECORD``. The result has the
    shared columns, the fields of the outcomes with the number of the sink after their names, except ``letter``, and
    instead a column with the letters of a row in all sinks: an array of structs with the number of the sink in the
    first field, null for sinks that write none; it is empty for rows without a letter.

    Not structs of a sink: Spark would fill unused fields too, for each row. Not a column of letters for each
    sink, and not a struct that is null for most rows: Spark determines the size of the Arrow batch after each row, for
    which Arrow visits all vectors, and all nulls at the end of those of arrays, such as the headers of a letter.
    """
    columns = [quoted(name) for name in rows.columns if name.startswith(SHARED)]
    letters: dict[str, str] = {}
    record = rows.schema[RECORD].dataType
    assert isinstance(record, StructType)
    for n in range(count):
        sink = outcome_column(n)
        found = rows.schema[sink].dataType
        assert isinstance(found, StructType)
        columns += [f"{sink}.{name} AS {name}{n}" for name in found.names if name != "letter"]
        if "letter" in found.names:
            letter = found["letter"].dataType
            assert isinstance(letter, StructType)
            fields = {_SINK: str(n)} | {name: f"{sink}.letter.{quoted(name)}" for name in letter.names}
            fields |= {name: f"{RECORD}.{quoted(name)}" for name in record.names}
            letters[f"{sink}.letter IS NOT NULL"] = structure(fields)
    if letters:
        each = ", ".join(f"CASE WHEN {exists} THEN {letter} END" for exists, letter in letters.items())
        columns.append(f"CASE WHEN {' OR '.join(letters)} THEN array({each}) ELSE array() END AS {_LETTERS}")
    return rows.selectExpr(*columns)


class Outcomes(NamedTuple):
    """The sink ``number`` of a batch, and the directories for the files of its rows and of its dead letters.

    ``names`` are the columns of the files, in order: fields of ``row``, or columns of the batch with the prefix
    ``SHARED``. Both directories are new, on a file system that all executors share, or paths in a bucket.
    None: dead letters are not written.
    """

    number: int
    names: tuple[str, ...]
    rows: StoragePath
    letters: StoragePath | None
    partitions: tuple[str, ...] = ()
    """Columns in ``names``: a file has the rows of one value of each, and lacks these columns."""
    file_bytes: int | None = None
    """Size at which a task begins another file with rows."""


def type_of_rows(batch: StructType, number: int, names: Sequence[str]) -> StructType:
    """Return the type of the rows that a sink writes of ``batch`` (``flattened``); see :class:`Outcomes`."""
    own = _own(batch, number)
    found = (own[name] if name in own.names else batch[SHARED + name] for name in names)
    return StructType(
        [StructField(name, field.dataType, field.nullable) for name, field in zip(names, found, strict=True)]
    )


def _own(batch: StructType, number: int) -> StructType:
    own = batch[f"row{number}"].dataType if f"row{number}" in batch.names else StructType([])
    assert isinstance(own, StructType)
    return own


def write_in_one_pass(batch: DataFrame, sinks: Sequence[Outcomes]) -> list[PassResult]:
    """Write the rows and dead letters of ``sinks`` in ``batch`` (``flattened``), which may have further sinks.

    The caller commits or removes the files.
    """
    schema, version = batch.schema, batch.sparkSession.version
    own = {sink.number: _own(schema, sink.number).names for sink in sinks}
    used = {SHARED + name for sink in sinks for name in sink.names if name not in own[sink.number]}
    used |= {f"{field}{sink.number}" for sink in sinks for field in ("state", "row", "checks", "more")}
    used |= {_LETTERS for sink in sinks if sink.letters is not None}
    columns = [name for name in schema.names if name in used]
    targets = [
        _SinkTargets(
            sink.number,
            tuple((name, name in own[sink.number]) for name in sink.names),
            _target(type_of_rows(schema, sink.number, sink.names), sink.rows, version, sink.file_bytes),
            None if sink.letters is None else _target(_letter_type(schema), sink.letters, version),
            sink.partitions,
        )
        for sink in sinks
    ]
    chosen = batch if columns == schema.names else batch.selectExpr(*map(quoted, columns))
    results = map_in_arrow(chosen, partial(_write_task, targets), _RESULT).collect()
    return [_result(sink, [row for row in results if row["sink"] == sink.number]) for sink in sinks]


def start_worker(spark: SparkSession) -> None:
    """Run a job with a task like those of :func:`write_in_one_pass`, without files.

    The first job of a session loads a thousand classes of Java and starts a Python worker, which imports its modules:
    some seconds, which the caller has while it builds its queries. The worker then waits for the first batch.
    """
    spark.sparkContext.setJobDescription("penstock: start of a worker")
    rows = spark.range(0, 1, 1, 1).selectExpr("id", "CAST(id AS STRING) AS text")
    rows.mapInArrow(_with_modules, rows.schema).collect()


def _with_modules(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield ``batches`` unchanged in a worker that has the modules of :func:`_write_task`."""
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401 - as FileWriter does

    yield from batches


def _letter_type(batch: StructType) -> StructType:
    """Return the type of the letters in the files of a sink."""
    letters = batch[_LETTERS].dataType
    assert isinstance(letters, ArrayType)
    letter = letters.elementType
    assert isinstance(letter, StructType)
    return StructType(letter.fields[1:])


def _result(sink: Outcomes, results: list[Row]) -> PassResult:
    checks: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for result in results:
        checks.update(json.loads(result["checks"]))
        steps.update(json.loads(result["letters_steps"]))
    out, dead, filtered, exploded = (
        sum(int(result[name]) for result in results) for name in ("out", "dead", "filtered", "exploded")
    )
    return PassResult(
        out,
        dead,
        filtered,
        exploded,
        _files(sink.rows, results, "rows_files", "out"),
        None if sink.letters is None else _files(sink.letters, results, "letters_files", "letters"),
        checks,
        steps,
    )


def _files(attempt: StoragePath, results: list[Row], file: str, count: str) -> WrittenFiles:
    names = tuple(sorted(str(name) for result in results for name in json.loads(result[file])))
    return WrittenFiles(attempt, names, sum(int(result[count]) for result in results))


class _SinkTargets(NamedTuple):
    """Files of the sink ``number``: ``columns`` are names, and whether they are fields of the sink's ``row``."""

    number: int
    columns: tuple[tuple[str, bool], ...]
    rows: FileTarget
    letters: FileTarget | None
    partitions: tuple[str, ...]


def _target(kind: DataType, directory: StoragePath, version: str, file_bytes: int | None = None) -> FileTarget:
    # Readers determine by the version how dates before 1582 are stored.
    metadata = {SPARKS_SCHEMA: kind.json().encode(), b"org.apache.spark.version": version.encode()}
    return FileTarget(directory, metadata, file_bytes)


def _write_task(sinks: Sequence[_SinkTargets], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the files of one task. Runs in an executor; a repeated task writes other files."""
    import pyarrow as pa

    written = [_SinkFiles(targets) for targets in sinks]
    try:
        for batch in batches:
            letters = _letters_of(batch)
            for sink in written:
                sink.write(batch)
                if letters is not None:
                    sink.write_letters(letters)
    finally:
        for sink in written:
            sink.close()
    results = [sink.result() for sink in written]
    types = {name: pa.string() if name.endswith(("files", "steps", "checks")) else pa.int64() for name in results[0]}
    yield pa.RecordBatch.from_arrays(
        [pa.array([result[name] for result in results], kind) for name, kind in types.items()], names=list(types)
    )


def _is(numbers: pa.Array[Any], value: int) -> pa.BooleanArray:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.equal(numbers, pa.scalar(value, numbers.type))


def _letters_of(batch: pa.RecordBatch) -> pa.RecordBatch | None:
    """Return the dead letters of ``batch`` in all sinks, with the number of the sink; None if there are none."""
    import pyarrow as pa

    if _LETTERS not in batch.schema.names:
        return None
    letters = cast("pa.ListArray[Any]", batch.column(_LETTERS)).flatten().drop_null()
    return pa.RecordBatch.from_struct_array(cast("pa.StructArray", letters)) if len(letters) else None


def _counted(names: pa.Array[Any]) -> dict[str, int]:
    """Return how often each of ``names`` occurs."""
    import pyarrow.compute as pc

    found = pc.value_counts(names)
    pairs = zip(found.field("values"), found.field("counts"), strict=True)
    return {str(name.as_py()): int(count.as_py()) for name, count in pairs}


class _SinkFiles:
    """The files of one sink in one task, and its counts."""

    def __init__(self, targets: _SinkTargets) -> None:
        self._dead = self._filtered = self._exploded = 0
        self._checks: Counter[str] = Counter()
        self._steps: Counter[str] = Counter()
        self._number = targets.number
        self._columns = targets.columns
        self._rows = (
            PartitionFiles(targets.rows, targets.partitions) if targets.partitions else FileWriter(targets.rows)
        )
        self._letters = None if targets.letters is None else FileWriter(targets.letters)

    def write(self, batch: pa.RecordBatch) -> None:
        """Write the rows that ``batch`` has for this sink."""
        import pyarrow.compute as pc

        n = self._number
        state = batch.column(f"state{n}")
        self._dead += _is(state, _DEAD).true_count
        self._filtered += _is(state, _FILTERED).true_count
        if f"more{n}" in batch.schema.names:
            self._exploded += int(pc.sum(batch.column(f"more{n}")).as_py() or 0)
        if f"checks{n}" in batch.schema.names:
            names = cast("pa.ListArray[pa.StringScalar]", batch.column(f"checks{n}")).flatten()
            self._checks.update(_counted(names))
        is_alive = _is(state, _ALIVE)
        if is_alive.true_count:
            rows = self._rows_of(batch)
            self._rows.write(rows if is_alive.true_count == len(rows) else rows.filter(is_alive))

    def write_letters(self, letters: pa.RecordBatch) -> None:
        """Write those of the ``letters`` of all sinks (``_letters_of``) that belong to this sink."""
        if self._letters is None:
            return
        mine = letters.filter(_is(letters.column(_SINK), self._number))
        if len(mine):
            self._steps.update(_counted(mine.column("step")))
            self._letters.write(mine.drop_columns([_SINK]))

    def _rows_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the columns of the sink, with rows that are not alive."""
        import pyarrow as pa

        arrays, fields = [], []
        for name, is_own in self._columns:
            if is_own:
                row = cast("pa.StructArray", batch.column(f"row{self._number}"))
                arrays.append(row.field(name))
                fields.append(row.type.field(name))
            else:
                arrays.append(batch.column(SHARED + name))
                fields.append(batch.schema.field(SHARED + name).with_name(name))
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def close(self) -> None:
        """Complete the files."""
        self._rows.close()
        if self._letters is not None:
            self._letters.close()

    def result(self) -> dict[str, int | str | None]:
        """Return the number of the sink, counts and names of files."""
        rows, letters = self._rows, self._letters
        return {
            "sink": self._number,
            "out": rows.count,
            "dead": self._dead,
            "filtered": self._filtered,
            "exploded": self._exploded,
            "letters": 0 if letters is None else letters.count,
            "rows_files": json.dumps(rows.names),
            "letters_files": json.dumps([] if letters is None else letters.names),
            "letters_steps": json.dumps(self._steps),
            "checks": json.dumps(self._checks),
        }
