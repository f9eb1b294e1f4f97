"""The error that ended a query, out of Spark's stack of tracebacks."""

from __future__ import annotations

import re

__all__ = ["cause", "is_named_by_spark", "is_of_a_busy_machine", "whole"]

CAUSES_SHOWN = 10

_OURS = re.compile(r"penstock\.[a-z_.]+\.(?P<kind>[A-Z]\w+): (?P<text>.+(?:\n +(?:why|do): .*)*)")
_SPARKS = re.compile(r"\[(?P<name>[A-Z][A-Z0-9_]*(?:\.[A-Z][A-Z0-9_]*)*)\] \S.*")
"""An error condition of Spark's, as in ``[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column ...``."""
_WRAPPERS = {"FOREACH_BATCH_USER_FUNCTION_ERROR", "STREAM_FAILED"}
_BUSY = re.compile(r"Python worker failed to connect back|\[CANNOT_OPEN_SOCKET\]")
"""Spark gives a Python process of its own ten seconds to start, and has no option for it."""
_PYTHONS = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception): \S.*", re.MULTILINE)


def cause(text: str) -> tuple[str, str]:
    """The kind and the words of the error that ended a query, out of Spark's stack of tracebacks.

    Errors of ours come through Python workers, the JVM and back as text only; the last one is the one that was raised.
    Kind is empty for errors of others: there the last condition that Spark names is the cause, else the last error of a
    Python traceback, else the first line.
    """
    found = list(_OURS.finditer(text))
    if found:
        return found[-1]["kind"], found[-1]["text"]
    conditions = [match[0] for match in _SPARKS.finditer(text) if match["name"] not in _WRAPPERS]
    if conditions or (conditions := _PYTHONS.findall(text)):
        return "", str(conditions[-1]).rstrip(" ;")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    deeper = [line for line in lines if line.startswith("Caused by:")]
    return "", " / ".join([*lines[:1], *deeper[-1:]]) or "the query ended without a reason"


def whole(error: BaseException) -> str:
    """What an error of Spark's says, and what each of its causes in the JVM says: its own text leaves those out."""
    texts = [str(error)]
    # Spark keeps the causes of a query's error here and nowhere else.
    while (deeper := getattr(error, "_cause", None)) is not None and len(texts) < CAUSES_SHOWN:
        error = deeper
        # The first line; what Spark appends to it is the stack.
        kind = re.search(r"^[\w.$]+(?:Exception|Error)\b", getattr(error, "_stackTrace", None) or "")
        texts.append(f"Caused by: {kind[0] + ': ' if kind else ''}{error}")
    return "\n".join(texts)


def is_of_a_busy_machine(words: str) -> bool:
    """Whether the words of a cause are that Spark's Python processes were not started in time."""
    return _BUSY.search(words) is not None


def is_named_by_spark(words: str) -> bool:
    """Whether the words of a cause are an error condition of Spark's: mostly one of data or SQL."""
    return _SPARKS.match(words) is not None
