"""Input rows of the sinks: schema validation and conversion.

Each sink has one table of its columns, which validation, errors and reading share.

Modules are imported where they are used: Spark imports this one for every user of any data source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.types import ArrayType, BinaryType, DataType, StringType, StructType

from penstock.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SinkSchema", "as_bytes", "one_of", "pairs", "read_rows", "refuse_overwrite", "task_name", "text"]

Kind = Callable[[DataType], bool]
"""Function that returns True if a column may have the type."""


class SinkSchema(NamedTuple):
    """Columns of a sink: the type of each, a description for error messages, and an example that selects them."""

    sink: str
    columns: Mapping[str, Kind]
    description: str
    example: str

    def check(self, schema: StructType, required: Iterable[str], *, topic: str | None = None) -> None:
        """Check that ``schema`` has only known columns with accepted types, and all ``required`` columns.

        The column ``topic`` is not required if the option ``topic`` is set.

        Raises:
            ConfigError: the schema is invalid; the error lists the accepted columns and how to select them.
        """
        given = {field.name: field.dataType for field in schema.fields}
        known = {name: kind for name, kind in given.items() if name in self.columns}
        others = [name for name in given if name not in known]
        wrong = [f"{name} as {kind.simpleString()}" for name, kind in known.items() if not self.columns[name](kind)]
        lacks = [name for name in required if name not in given and not (name == "topic" and topic is not None)]
        if not (others or wrong or lacks):
            return
        options = ["topic (the column, or the option)" if name == "topic" else name for name in lacks]
        what = [f"it has {', '.join(others + wrong)}"] if others or wrong else []
        what += [f"it lacks {', '.join(options)}"] if lacks else []
        raise ConfigError(
            f"the {self.sink} sink cannot write rows of {schema.simpleString()}: {'; '.join(what)}",
            option="schema",
            why=f"its columns are {self.description}",
            hint=f"select them, for example with .selectExpr({self.example})",
        )


def one_of(*kinds: type[DataType]) -> Kind:
    """Accept a column of one of these types."""
    return lambda kind: isinstance(kind, kinds)


def text(kind: DataType) -> bool:
    """Accept a column of type string or binary."""
    return isinstance(kind, (StringType, BinaryType))


def pairs(value: Kind) -> Kind:
    """Accept ``array<struct<key: string, value: ...>>``: names and values in order, with duplicate names."""

    def is_pairs(kind: DataType) -> bool:
        if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
            return False
        fields = kind.elementType.fields
        return [field.name for field in fields] == ["key", "value"] and (
            isinstance(fields[0].dataType, StringType) and value(fields[1].dataType)
        )

    return is_pairs


def refuse_overwrite(sink: str, *, why: str, hint: str = 'write with mode("append")') -> ConfigError:
    """Return the error for ``mode("overwrite")``."""
    return ConfigError(f'the {sink} sink has no mode("overwrite")', option="mode", why=why, hint=hint)


def read_rows(batch: pa.RecordBatch, columns: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    """Return the rows of ``batch`` as tuples of ``columns``; None for a column that the batch lacks."""
    nothing: list[Any] = [None] * batch.num_rows
    names = set(batch.schema.names)
    return zip(*(batch.column(name).to_pylist() if name in names else nothing for name in columns), strict=True)


def task_name(job: str) -> str:
    """Return a name for the current task: query and batch of a stream, or ``job``, and the partition.

    It is the same for every attempt of the task, and if a batch is repeated after a restart.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "must be called in a Spark task"
    query, batch = context.getLocalProperty("sql.streaming.queryId"), context.getLocalProperty("streaming.sql.batchId")
    return "/".join(filter(None, (query or job, batch, str(context.partitionId()))))


def as_bytes(value: str | bytes) -> bytes:
    """Encode a string as UTF-8; return bytes unchanged."""
    return value.encode() if isinstance(value, str) else bytes(value)
