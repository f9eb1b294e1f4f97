"""Failures of a run that may be temporary, and the end of Spark's Java process."""

from __future__ import annotations

import re
from typing import NamedTuple

from py4j.protocol import Py4JError, Py4JNetworkError

from penstock.errors import UnavailableError

__all__ = [
    "BROKEN",
    "BUSY",
    "FULL",
    "UNAVAILABLE",
    "RetryPolicy",
    "is_incompatible_state",
    "is_jvm_exit",
    "jvm_exit_error",
    "retry_policy",
]

_BUSY = re.compile(r"Python worker failed to connect back|\[CANNOT_OPEN_SOCKET\]")
"""Spark waits ten seconds for a Python process to start, and has no option for it."""
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_BUCKET = re.compile(
    r"AWSClientIOException|AWSStatus500Exception|AWSServiceThrottledException|SdkClientException|"
    r"ApiCall(Attempt)?TimeoutException|ConnectTimeoutException"
)
"""Failures of `s3a` in which the storage of a checkpoint did not answer, or was busy."""
_NO_CREDENTIALS = re.compile(r"Unable to load credentials|NoAuthWithAWSException|NoAwsCredentialsException")
_OTHER_STATE = re.compile(r"\[STATE_STORE_\w*(SCHEMA|FORMAT)\w*\]")


class RetryPolicy(NamedTuple):
    """A failure that may be temporary: how long to retry, and the hint if it persists.

    ``apart_s``: pause between the restarts of several queries. ``waits``: a run without an end retries without a limit,
    and warns after ``limit_s``.
    """

    limit_s: float
    hint: str
    apart_s: float = 0.0
    waits: bool = False


UNAVAILABLE = RetryPolicy(120.0, "start the system that does not answer, or correct its address", waits=True)
"""A system that the query needs is unavailable. The end of the run would stop its other sinks as well."""
FULL = RetryPolicy(120.0, "free space for its state and tables, then start it: it continues from its checkpoints")
"""A disk is full."""
BUSY = RetryPolicy(600.0, "use a larger machine, or fewer pipelines and sinks, then start the run", 5.0)
"""The machine is too busy to start Spark's processes. Ending the run would not help, but restarting all queries at the
same time would add to the load."""


def retry_policy(kind: str, words: str, text: str) -> RetryPolicy | None:
    """Classify a failure that may be temporary; ``kind`` and ``words`` are the cause extracted from ``text``."""
    if kind == UnavailableError.__name__:
        return UNAVAILABLE
    if _FULL.search(text) is not None:
        return FULL
    if not kind and _BUCKET.search(text) is not None and _NO_CREDENTIALS.search(text) is None:
        return UNAVAILABLE
    return BUSY if not kind and _BUSY.search(words) is not None else None


def is_incompatible_state(words: str) -> bool:
    """Return True if the cause is a query state whose column types differ from those of the query."""
    return _OTHER_STATE.match(words) is not None


BROKEN = (Py4JError, ConnectionError)
"""Exceptions of a call to Spark that Java did not answer; see :func:`is_jvm_exit`."""


def is_jvm_exit(error: BaseException) -> bool:
    """Return True if ``error``, one of ``BROKEN``, means that Spark's Java process has ended."""
    # If the process ends during a call, the call fails without a Java stack trace.
    return isinstance(error, (Py4JNetworkError, ConnectionError)) or (
        type(error) is Py4JError and "Trace:" not in str(error)
    )


def jvm_exit_error() -> UnavailableError:
    """Return the error to show when Spark's Java process has ended."""
    return UnavailableError(
        "Spark's Java process has ended",
        why="it was killed, or the machine ran out of memory",
        hint="start the pipeline again: it continues from its checkpoints",
    )
