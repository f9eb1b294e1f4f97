"""How the error that ended a query is found in what Spark says about it."""

from __future__ import annotations

import pytest

from penstock.pipelines.run import cause

THROUGH_PYTHON = """\
[FOREACH_BATCH_USER_FUNCTION_ERROR] An error occurred in the user provided function. Reason: Traceback:
  File "batches.py", line 1, in __call__
penstock.errors.UnavailableError: the state store did not answer
  why: no connection
  do:  start the node

During handling of the above exception, another exception occurred:

penstock.errors.PenstockError: the disk is full
  do:  make room
\tat py4j.Protocol.getReturnValue(Protocol.java:476)
"""
OF_SPARK = """\
Task not serializable
=== Streaming Query ===
Caused by: java.io.NotSerializableException: a
Caused by: java.util.ConcurrentModificationException
"""


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (THROUGH_PYTHON, "PenstockError", "the disk is full\n  do:  make room"),
        (
            THROUGH_PYTHON.split("During", maxsplit=1)[0],
            "UnavailableError",
            "the state store did not answer\n  why: no connection\n  do:  start the node",
        ),
        (OF_SPARK, "", "Task not serializable / Caused by: java.util.ConcurrentModificationException"),
        ("", "", "the query ended without a reason"),
    ],
)
def test_the_last_error_of_ours_or_sparks_first_line_and_deepest_cause(text: str, kind: str, words: str) -> None:
    assert cause(text) == (kind, words)
