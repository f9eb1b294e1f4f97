"""How the error that ended a query is found in what Spark says about it."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.errors import PenstockError, UnavailableError
from penstock.pipelines import run
from penstock.pipelines.build import BuiltQuery
from penstock.pipelines.run import cause
from tests.unit.pipelines.files import FILE, parse

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
COLUMN = "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column `celcius` cannot be resolved. SQLSTATE: 42703; line 1 pos 0"
THROUGH_PROXY = f"""\
An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "batches.py", line 1, in __call__
pyspark.errors.exceptions.captured.AnalysisException: {COLUMN};
'Filter ('celcius > 1)

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
        (THROUGH_PROXY, "", COLUMN),
        ("", "", "the query ended without a reason"),
    ],
)
def test_the_last_error_of_ours_or_sparks_first_line_and_deepest_cause(text: str, kind: str, words: str) -> None:
    assert cause(text) == (kind, words)


class OfSpark(Exception):  # noqa: N818 - stands for pyspark's CapturedException
    def __init__(self, text: str, stack: str = "", cause: Exception | None = None) -> None:
        super().__init__(text)
        self._stackTrace = stack
        self._cause = cause


def test_the_causes_in_the_jvm_are_told() -> None:
    deepest = OfSpark("object not serializable (class: a.B)", "java.io.NotSerializableException: a.B\n\tat c")
    error = OfSpark("Task not serializable", cause=OfSpark("Job aborted", "org.apache.Spark", deepest))
    assert cause(run._whole(error)) == (
        "",
        "Task not serializable / Caused by: java.io.NotSerializableException: object not serializable (class: a.B)",
    )


def test_ctrl_c_stays_what_the_caller_made_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    with run._own_interrupt():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as Spark's start sets a handler of its own
    assert signal.getsignal(signal.SIGINT) is before


def test_a_node_that_is_not_there_is_told_before_spark_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "session", None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: nobody answers here
        port = taken.getsockname()[1]
        pipeline = parse(f'{FILE}statestore: {{broker: "mqtt://127.0.0.1:{port}"}}\n')
        with pytest.raises(UnavailableError, match=f"no connection to .*{port}"):
            run.run(pipeline, state=tmp_path, emit=lambda _: None, stop=threading.Event())


@pytest.mark.parametrize(("text", "tries"), [(COLUMN, 3), ("Task not serializable", 8)])
def test_what_spark_has_no_name_for_is_tried_longer(text: str, tries: int) -> None:
    events: list[run.Event] = []
    loop = run._Run(parse(), events.append, threading.Event(), available_now=False, conf={})
    running = run._Running(cast(BuiltQuery, SimpleNamespace(name="rows")))
    for _ in range(tries):
        loop._failed(running, text)
    assert [event["event"] for event in events] == ["retry"] * tries
    with pytest.raises(PenstockError, match=f"{tries + 1} tries in a row failed"):
        loop._failed(running, text)
