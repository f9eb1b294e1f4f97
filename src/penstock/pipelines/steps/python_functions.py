"""Python steps: columns computed by a function of the user's file over Arrow batches.

The text of the file is part of the task, so executors need neither the file nor its directory. A function that fails is
called again with halves of its batch until the row on which it fails is found; this row becomes a dead letter with the
error and the line of the file, and the others continue.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError, PenstockError, shortened
from penstock.pipelines.spec.steps import PythonFunction

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["FAILED", "CalledFunction", "python_step"]

FAILED = "python.failed"
"""Code of the dead letters."""
_MOST_REASON = 300
"""Maximum characters of a reason."""
_MOST_FUNCTIONS = 64
_loaded: dict[tuple[str, str, str], Callable[[pa.RecordBatch], object]] = {}
"""Functions of this process by file, name and text of the file."""


def python_step(rows: DataFrame, name: str, given: PythonFunction) -> DataFrame:
    """Add the columns that the function computes to live ``rows``; rows on which it fails become dead.

    Raises:
        ConfigError: the file cannot be loaded, or a column does not exist.
    """
    from pyspark.sql import functions as sf
    from pyspark.sql.types import StringType, StructField, StructType

    from penstock.pipelines.rows import alive, data_columns, internal_columns, mark_dead
    from penstock.pipelines.steps.arrow_functions import arrow_function, arrow_schema
    from penstock.pipelines.steps.expressions import quoted_column
    from penstock.pipelines.steps.parsing import nullable_columns, schema_of

    schema = schema_of(name, given.columns)
    nullable = nullable_columns(schema)
    function = CalledFunction(
        name, given.file, given.function, given.code, arrow_schema(nullable), given.on_error == "fail"
    )
    function.load()

    def call(batch: Any) -> Any:
        return function(batch)

    kind = StructType([StructField("value", nullable), StructField("reason", StringType())])
    chosen = given.input or data_columns(rows)
    value = sf.when(alive(), sf.struct(*(quoted_column(column).alias(column) for column in chosen)))
    called = rows.withColumn("_called", arrow_function(call, kind)(value))
    failures = [(FAILED, sf.col("_called.reason"))]
    failures += [
        (
            "schema.null",
            sf.when(sf.col("_called.value")[f.name].isNull(), sf.lit(f"column {f.name!r} is missing or null")),
        )
        for f in schema.fields
        if not f.nullable
    ]
    marked = mark_dead(called, name, failures)
    made = {f.name: sf.when(alive(), sf.col("_called.value")[f.name]) for f in schema.fields}
    lower = {column.lower() for column in made}
    kept = [quoted_column(column) for column in data_columns(rows) if column.lower() not in lower]
    return marked.select(*internal_columns(rows), *kept, *(column.alias(each) for each, column in made.items()))


class _FailedRow(NamedTuple):
    """Reason for which the function fails on a row."""

    reason: str


@dataclass(frozen=True, slots=True)
class CalledFunction:
    """The function ``name`` of ``file``, whose text is ``code``; ``schema``: the columns that it must return."""

    step: str
    file: str
    name: str
    code: str
    schema: pa.Schema
    stops: bool
    """True if an error stops the run."""

    def __call__(self, given: pa.StructArray) -> pa.StructArray:
        """Return a struct for each struct of ``given``: ``value``, with the columns, or ``reason``; null for null.

        Raises:
            PenstockError: the function returned something else than rows for its batch, or failed and ``stops``.
        """
        import pyarrow as pa

        live = given.drop_null()
        batch = pa.RecordBatch.from_struct_array(live)
        values: list[pa.StructArray] = []
        reasons: list[str | None] = []
        for found in self._results(self.load(), batch):
            if isinstance(found, _FailedRow):
                reasons.append(found.reason)
                values.append(pa.nulls(1, pa.struct(list(self.schema))))
            else:
                reasons += [None] * len(found)
                values.append(found)
        results = pa.StructArray.from_arrays(
            [
                pa.concat_arrays(values) if values else pa.nulls(0, pa.struct(list(self.schema))),
                pa.array(reasons, pa.string()),
            ],
            ["value", "reason"],
        )
        return results if given.null_count == 0 else results.take(_places(given))

    def load(self) -> Callable[[pa.RecordBatch], object]:
        """Return the function; the file is run once in each process.

        Raises:
            ConfigError: the file fails when it is run, or has no such function.
        """
        key = (self.file, self.name, self.code)
        found = _loaded.get(key)
        if found is None:
            if len(_loaded) >= _MOST_FUNCTIONS:
                _loaded.clear()
            found = _loaded[key] = self._load()
        return found

    def _load(self) -> Callable[[pa.RecordBatch], object]:
        module = ModuleType(f"penstock_step_{self.step}")
        module.__file__ = self.file
        # For tracebacks with lines of the file, which executors do not have.
        linecache.cache[self.file] = (len(self.code), None, self.code.splitlines(keepends=True), self.file)
        try:
            exec(compile(self.code, self.file, "exec"), module.__dict__)  # noqa: S102 - the step's own code
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the user's code is reported
            raise ConfigError(
                f"step {self.step!r}: {self.file} cannot be loaded: {self._error_text(error)}",
                option="python",
                hint="correct the file; packages that it imports must be installed for Spark's workers",
            ) from None
        function: Callable[[pa.RecordBatch], object] | None = getattr(module, self.name, None)
        if not callable(function):
            raise ConfigError(f"step {self.step!r}: {self.name!r} in {self.file} is not a function", option="function")
        return function

    def _results(
        self, function: Callable[[pa.RecordBatch], object], batch: pa.RecordBatch
    ) -> Iterator[pa.StructArray | _FailedRow]:
        """Yield the results of the rows of ``batch`` in order."""
        if not len(batch):
            return
        try:
            returned = function(batch)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the user's code is reported
            failure = self._error_text(error)
        else:
            made = self._converted(self._columns(returned, batch), len(batch))
            if not isinstance(made, str):
                yield made
                return
            failure = made
        if self.stops:
            raise PenstockError(
                f"step {self.step!r}: {failure}",
                why="the step has `on_error: fail`",
                hint=f"correct {self.file} or the data, and start the pipeline again: it continues with this batch",
            )
        if len(batch) == 1:
            yield _FailedRow(failure)
            return
        half = len(batch) // 2
        yield from self._results(function, batch.slice(0, half))
        yield from self._results(function, batch.slice(half))

    def _columns(self, returned: object, batch: pa.RecordBatch) -> dict[str, Any]:
        """Return the columns of the schema in ``returned``.

        Raises:
            PenstockError: a column is missing or unknown, or has another number of rows than ``batch``.
        """
        import pyarrow as pa

        found: dict[str, Any]
        if isinstance(returned, pa.RecordBatch | pa.Table):
            found = dict(zip(returned.schema.names, returned.columns, strict=True))
        elif isinstance(returned, Mapping):
            found = dict(returned)
        else:
            raise self._misuse(f"{type(returned).__name__}", "return a record batch, a table, or a dict of columns")
        for name in self.schema.names:
            if name not in found:
                known = ", ".join(map(str, found)) or "none"
                raise self._misuse(f"no column {name!r}, only {known}", f"return {', '.join(self.schema.names)}")
            is_value = isinstance(found[name], str | bytes) or not hasattr(found[name], "__len__")
            length = None if is_value else len(found[name])
            if length != len(batch):
                shown = "a single value" if length is None else f"{length} rows"
                raise self._misuse(
                    f"{shown} of column {name!r} for a batch of {len(batch)}",
                    "return one row for each row of the batch, in order; a filter step drops rows",
                )
        unknown = [name for name in found if name not in self.schema.names and name not in batch.schema.names]
        if unknown:
            raise self._misuse(f"a column {unknown[0]!r}", "add it to the schema of the step, or do not return it")
        return {name: found[name] for name in self.schema.names}

    def _misuse(self, returned: str, hint: str) -> PenstockError:
        return PenstockError(f"step {self.step!r}: {self.name} in {self.file} returned {returned}", hint=hint)

    def _converted(self, columns: Mapping[str, Any], rows: int) -> pa.StructArray | str:
        """Return ``columns`` with the types of the schema, or why a column cannot be converted."""
        import pyarrow as pa

        make: Any = pa.array
        arrays: list[Any] = []
        for field in self.schema:
            given = columns[field.name]
            try:
                if isinstance(given, pa.ChunkedArray):
                    given = pa.concat_arrays(given.chunks) if given.num_chunks else pa.nulls(0, given.type)
                made = given.cast(field.type) if isinstance(given, pa.Array) else make(given, field.type)
                # Arrow does not check texts and decimals that are computed, and Spark writes those that are invalid.
                made.validate(full=True)
                arrays.append(made)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                text = f"{self.file}: column {field.name!r} cannot be converted to {field.type}: {error}"
                return shortened(text, _MOST_REASON)
        assert all(len(array) == rows for array in arrays)
        return pa.StructArray.from_arrays(arrays, fields=list(self.schema))

    def _error_text(self, error: BaseException) -> str:
        """Return the error and its line in the file."""
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.file]
        if isinstance(error, SyntaxError) and error.filename == self.file:
            lines.append(error.lineno)
        where = f"{self.file}, line {lines[-1]}" if lines else self.file
        # A text with half of a surrogate pair, as JSON may have, cannot be a reason in Arrow.
        text = " ".join(str(error).encode(errors="backslashreplace").decode().split())
        return shortened(f"{where}: {type(error).__name__}" + (f": {text}" if text else ""), _MOST_REASON)


def _places(given: pa.StructArray) -> pa.Array[Any]:
    """Return for each struct of ``given`` its place among those that are not null; null for null."""
    import numpy as np
    import pyarrow as pa

    is_live = np.asarray(given.is_valid())
    return pa.array(np.cumsum(is_live) - 1, pa.int64(), mask=~is_live)
