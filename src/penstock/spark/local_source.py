"""Base class of sources without a broker: the columns of ``tubemq``, and options that a pipeline has validated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from penstock.spark.tube.options import WITH_HEADERS
from penstock.spark.tube.source import spark_schema

__all__ = ["LocalSource"]


class LocalSource(DataSource):
    """A source whose options were written by a pipeline and need no validation."""

    format_name: ClassVar[str]
    readers: ClassVar[
        tuple[Callable[[Mapping[str, str]], DataSourceReader], Callable[[Mapping[str, str]], DataSourceStreamReader]]
    ]
    """Of a batch and of a stream, made from the options."""

    @classmethod
    def name(cls) -> str:
        """Name for ``format``."""
        return cls.format_name

    def schema(self) -> StructType:
        """The columns of ``tubemq``, headers included."""
        return spark_schema(WITH_HEADERS)

    def reader(self, schema: StructType) -> DataSourceReader:
        """For a batch."""
        return self.readers[0](dict(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For a stream."""
        return self.readers[1](dict(self.options))
