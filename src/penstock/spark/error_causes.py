"""Causes of Spark's errors: the error that was raised, without the tracebacks and stacks around it."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["ErrorText", "error_text", "full_text", "innermost_cause", "is_spark_condition", "java_stacks"]

CAUSES_SHOWN = 10

_OURS = re.compile(r"penstock\.[a-z_.]+\.(?P<kind>[A-Z]\w+): (?P<text>.+(?:\n +(?:why|hint): .*)*)")
_SPARKS = re.compile(r"\[(?P<name>[A-Z][A-Z0-9_]*(?:\.[A-Z][A-Z0-9_]*)*)\] \S.*")
"""A Spark error condition, as in ``[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column ...``."""
_WRAPPERS = {"FOREACH_BATCH_USER_FUNCTION_ERROR", "STREAM_FAILED"}
_CALLING = "An error occurred while calling"
"""Beginning of Py4J's message about a failed call; it does not contain the cause."""
_END_OF_STACK = re.compile(r"^(?:=== Streaming Query ===|Traceback \(most recent call last\):)", re.MULTILINE)
_PART = re.compile(r"\n +(?P<part>why|hint): +(?P<text>.*)")
_CAUSED_BY = "Caused by: "
_CRASHED = re.compile(r"(?:Exception: |Caused by: )Python worker exited unexpectedly")
_PYTHONS = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception): \S.*", re.MULTILINE)


def innermost_cause(text: str) -> tuple[str, str]:
    """Extract the class name and the text of the error that ended a query from Spark's tracebacks.

    Errors of penstock pass through Python workers and the JVM as text; the last one is the one that was raised. The
    class name is empty for other errors: their cause is the last Spark error condition, otherwise the last error of a
    Python traceback, otherwise the first line.
    """
    found = list(_OURS.finditer(text))
    if found:
        return found[-1]["kind"], found[-1]["text"]
    conditions = [match[0] for match in _SPARKS.finditer(text) if match["name"] not in _WRAPPERS]
    if conditions:
        return "", str(conditions[-1]).rstrip(" ;")
    if _CRASHED.search(text):
        # Its own cause is only that the connection to the process has ended.
        return (
            "",
            "a Python worker of Spark ended unexpectedly: it was killed, for lack of memory for example, or crashed",
        )
    raised = _PYTHONS.findall(text)
    if raised and _CALLING in raised[-1]:
        return "", _cause_in_java(text)
    if raised:
        return "", str(raised[-1]).rstrip(" ;")
    lines = [line.strip(" \t:") for line in text.splitlines() if line.strip() and not line.startswith(_CALLING)]
    deeper = [line for line in lines if line.startswith(_CAUSED_BY)]
    return "", " / ".join([*lines[:1], *deeper[-1:]]) or "the query ended without an error message"


class ErrorText(NamedTuple):
    """The parts of the text of an error of penstock."""

    what: str
    why: str | None = None
    hint: str | None = None


def error_text(words: str) -> ErrorText:
    """Split ``words``, the text of a cause, into the parts that ``PenstockError`` joined."""
    parts = {match["part"]: match["text"] for match in _PART.finditer(words)}
    return ErrorText(_PART.sub("", words), parts.get("why"), parts.get("hint"))


def _cause_in_java(text: str) -> str:
    """Extract the innermost Java exception of the last call that failed, without its stack."""
    stack = text[text.rindex(_CALLING) :]
    if end := _END_OF_STACK.search(stack):
        stack = stack[: end.start()]
    lines = [line.strip() for line in stack.splitlines()[1:] if line.strip() and not line.startswith("\tat ")]
    deeper = [line for line in lines if line.startswith(_CAUSED_BY)]
    found = deeper[-1].removeprefix(_CAUSED_BY) if deeper else next(iter(lines), "").removeprefix(": ")
    return found or "a call of Spark failed without a message"


def full_text(error: BaseException) -> str:
    """Return the text of a Spark error with those of its causes in the JVM, which Spark's text omits."""
    texts = [str(error)]
    # Only this attribute has the causes of a query's error.
    while (deeper := getattr(error, "_cause", None)) is not None and len(texts) < CAUSES_SHOWN:
        error = deeper
        # The first line; what Spark appends to it is the stack.
        kind = re.search(r"^[\w.$]+(?:Exception|Error)\b", getattr(error, "_stackTrace", None) or "")
        texts.append(f"Caused by: {kind[0] + ': ' if kind else ''}{error}")
    return "\n".join(texts)


def java_stacks(error: BaseException) -> str:
    """Return the text of a Spark error and the Java stack of each of its causes, for developers."""
    parts = [str(error)]
    found: BaseException | None = error
    while found is not None and len(parts) <= CAUSES_SHOWN:
        parts.append(getattr(found, "_stackTrace", None) or "")
        found = getattr(found, "_cause", None)
    return "\n\n".join(dict.fromkeys(filter(None, parts)))


def is_spark_condition(words: str) -> bool:
    """Return True if the cause is a Spark error condition, which usually concerns data or SQL."""
    return _SPARKS.match(words) is not None
