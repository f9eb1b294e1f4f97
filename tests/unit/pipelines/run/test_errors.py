"""The cause of a failed query, found in Spark's error."""

from __future__ import annotations

import pytest

from penstock.pipelines.run.errors import (
    BUSY,
    UNAVAILABLE,
    is_incompatible_state,
    retry_policy,
)
from penstock.spark.error_causes import full_text, innermost_cause, is_spark_condition

THROUGH_PYTHON = """\
[FOREACH_BATCH_USER_FUNCTION_ERROR] An error occurred in the user provided function. Reason: Traceback:
  File "batches.py", line 1, in __call__
penstock.errors.UnavailableError: the state store did not answer
  why: no connection
  hint: start the node

During handling of the above exception, another exception occurred:

penstock.errors.PenstockError: the disk is full
  hint: make room
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
        (THROUGH_PYTHON, "PenstockError", "the disk is full\n  hint: make room"),
        (
            THROUGH_PYTHON.split("During", maxsplit=1)[0],
            "UnavailableError",
            "the state store did not answer\n  why: no connection\n  hint: start the node",
        ),
        (OF_SPARK, "", "Task not serializable / Caused by: java.util.ConcurrentModificationException"),
        (THROUGH_PROXY, "", COLUMN),
        ("", "", "the query ended without an error message"),
    ],
)
def test_the_last_error_of_ours_or_sparks_first_line_and_deepest_cause(text: str, kind: str, words: str) -> None:
    assert innermost_cause(text) == (kind, words)


class OfSpark(Exception):
    def __init__(self, text: str, stack: str = "", cause: Exception | None = None) -> None:
        super().__init__(text)
        self._stackTrace = stack
        self._cause = cause


def test_causes_in_the_jvm_are_reported() -> None:
    deepest = OfSpark("object not serializable (class: a.B)", "java.io.NotSerializableException: a.B\n\tat c")
    error = OfSpark("Task not serializable", cause=OfSpark("Job aborted", "org.apache.Spark", deepest))
    assert innermost_cause(full_text(error)) == (
        "",
        "Task not serializable / Caused by: java.io.NotSerializableException: object not serializable (class: a.B)",
    )


def test_error_conditions_of_spark_are_distinguished() -> None:
    assert is_spark_condition(COLUMN)
    assert not is_spark_condition("Task not serializable")


def test_start_timeouts_of_a_busy_machine_are_recognized() -> None:
    late = "org.apache.spark.SparkException: Python worker failed to connect back.\nCaused by: Timed out while waiting"
    assert retry_policy(*innermost_cause(late), late) is BUSY
    words = '[CANNOT_OPEN_SOCKET] Can not open socket: ["tried to connect"]'
    assert retry_policy("", words, words) is BUSY
    assert retry_policy("", COLUMN, COLUMN) is None
    assert retry_policy("UnavailableError", "the node is away", "the node is away") is UNAVAILABLE
    # A storage of checkpoints that does not answer, and one that refuses.
    for text, policy in (
        ("AWSClientIOException: getFileStatus on s3a://b/k: SdkClientException: Connection refused", UNAVAILABLE),
        (
            "AWSStatus500Exception: PUT 0-byte object  on state: (Service: S3, 503)",
            UNAVAILABLE,
        ),
        ("java.nio.file.AccessDeniedException: state: getFileStatus on state: (Service: S3, Status Code: 403)", None),
        ("org.apache.hadoop.fs.s3a.UnknownStoreException: `s3a://b/': Bucket does not exist", None),
        ("NoAuthWithAWSException: SdkClientException: Unable to load credentials from any of the providers", None),
    ):
        assert retry_policy("", text, text) is policy


def test_the_cause_of_a_failed_call_is_reported() -> None:
    text = (
        "An error occurred while calling o64.load.\n"
        ': java.io.IOException: Cannot run program "python3": error=13\n'
        "\tat java.base/java.lang.ProcessBuilder.start(ProcessBuilder.java:1143)\n"
        "Caused by: java.io.IOException: error=13, Permission denied\n"
    )
    first = 'java.io.IOException: Cannot run program "python3": error=13'
    assert innermost_cause(text) == ("", f"{first} / Caused by: java.io.IOException: error=13, Permission denied")


@pytest.mark.parametrize("part", ["KEY", "VALUE"])
def test_state_with_other_types_is_reported(part: str) -> None:
    words = f"[STATE_STORE_{part}_SCHEMA_NOT_COMPATIBLE] Provided schema does not match existing state schema."
    assert is_incompatible_state(words)
    assert is_spark_condition(words)
    assert not is_incompatible_state("[STATE_STORE_PROVIDER_OUT_OF_MEMORY] x")


FAILED_CALL = """\
An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "table.py", line 104, in _write_files
    rows.coalesce(1).write.parquet(str(attempt))
py4j.protocol.Py4JJavaError: An error occurred while calling o846.parquet.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 44.0 failed 1 times
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:2898)
Driver stacktrace:
Caused by: java.io.IOException: Mkdirs failed to create file:/a/b (exists=false, cwd=file:/)
\tat org.apache.hadoop.fs.ChecksumFileSystem.create(ChecksumFileSystem.java:515)
\t... 30 more

=== Streaming Query ===
Identifier: readings
Caused by: py4j.Py4JException: An exception was raised by the Python Proxy.
"""


def test_the_innermost_java_exception_of_a_failed_call_is_the_cause() -> None:
    words = "java.io.IOException: Mkdirs failed to create file:/a/b (exists=false, cwd=file:/)"
    assert innermost_cause(FAILED_CALL) == ("", words)
    assert innermost_cause(FAILED_CALL.partition("Caused by")[0])[1].startswith(
        "org.apache.spark.SparkException: Job aborted"
    )
    bare = "Traceback:\npy4j.protocol.Py4JJavaError: An error occurred while calling o1.parquet.\n"
    assert innermost_cause(bare) == ("", "a call of Spark failed without a message")


def test_a_python_worker_that_was_killed_is_named() -> None:
    """Its Java exception is only the end of a stream."""
    text = (
        "py4j.protocol.Py4JJavaError: An error occurred while calling o42.collectToPython.\n"
        ": org.apache.spark.SparkException: Job aborted due to stage failure\n"
        "\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:1)\n"
        "Caused by: org.apache.spark.SparkException: Python worker exited unexpectedly (crashed). Consider setting x\n"
        "\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.apply(PythonRunner.scala:1)\n"
        "Caused by: java.io.EOFException\n"
        "\tat java.base/java.io.DataInputStream.readInt(DataInputStream.java:398)\n"
    )
    words = "a Python worker of Spark ended unexpectedly: it was killed, for lack of memory for example, or crashed"
    assert innermost_cause(text) == ("", words)
    # A query that fails outside of a call of Python.
    of_query = (
        "Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times, most recent failure: Lost task 0.0\n"
        "=== Streaming Query ===\n"
        "Caused by: org.apache.spark.SparkException: Python worker exited unexpectedly (crashed). Consider setting x\n"
        "Caused by: java.io.EOFException: \n"
    )
    assert innermost_cause(of_query) == ("", words)
