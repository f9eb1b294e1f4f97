"""Fatal errors of the Kafka client, raised as the library raises them: with a type that is not an exception."""

from __future__ import annotations

import ctypes

from confluent_kafka import KafkaError

__all__ = ["raise_fatal"]


def raise_fatal(code: int, why: str = "it has ended") -> None:
    """Raise the fatal error ``code``. No ``raise`` statement can do that."""
    error = KafkaError(code, why, fatal=True)
    python = ctypes.pythonapi
    for each in (KafkaError, error):  # PyErr_Restore consumes a reference to each
        python.Py_IncRef(ctypes.py_object(each))
    python.PyErr_Restore(ctypes.py_object(KafkaError), ctypes.py_object(error), None)
