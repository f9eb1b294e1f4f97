"""Errors of penstock's data sources without the traceback of the process that raised them.

Spark's Python processes report an exception as the text of its whole traceback, which Spark puts into the error of the
query. An error of penstock has the failure, its cause and the action to take, so its traceback is reduced to the method
that Spark called. Other exceptions, which are bugs, keep their tracebacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar

from penstock.errors import PenstockError

__all__ = ["plain_errors"]

Class = TypeVar("Class", bound=type)

_CALLED_BY_SPARK = frozenset(
    {
        *("schema", "reader", "streamReader", "writer", "streamWriter"),
        *("partitions", "read", "initialOffset", "latestOffset", "reportLatestOffset", "prepareForTriggerAvailableNow"),
        *("write", "commit", "abort"),
    }
)
"""Methods of ``pyspark.sql.datasource``."""


def plain_errors(cls: Class) -> Class:
    """Decorate a data source, reader or writer: errors of penstock leave the methods of ``cls`` without a traceback."""
    for name, method in list(vars(cls).items()):
        if name in _CALLED_BY_SPARK:
            setattr(cls, name, _plain(method))
    return cls


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            result = method(*args, **kwargs)
        except PenstockError as error:
            raise error.with_traceback(None) from None
        return _iterated(result) if isinstance(result, Iterator) else result

    return called


def _iterated(items: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from items
    except PenstockError as error:
        raise error.with_traceback(None) from None
