"""Python steps without Spark: results, rows on which the function fails, mistakes in the file and in the result."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.pipelines.ledger.plan_changes import CHANGED
from penstock.pipelines.spec import description
from penstock.pipelines.spec.loader import load
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.steps.python_functions import CalledFunction

CODE = """\
import pyarrow.compute as pc

def score(batch):
    numbers = [int(text) for text in batch.column("text").to_pylist()]
    return {"score": numbers, "label": pc.utf8_upper(batch["text"])}
"""
FIELDS: dict[str, pa.DataType] = {"score": pa.float64(), "label": pa.string()}
SCHEMA = pa.schema(FIELDS)


def function(code: str, *, stops: bool = False) -> CalledFunction:
    return CalledFunction("scored", "score.py", "score", code, SCHEMA, stops)


def called(code: str, *texts: str | None, stops: bool = False) -> list[dict[str, Any] | None]:
    # Spark sends the function to its workers.
    copy: CalledFunction = pickle.loads(pickle.dumps(function(code, stops=stops)))
    given: Any = pa.array(
        [None if text is None else {"text": text} for text in texts], pa.struct([pa.field("text", pa.string())])
    )
    found: Any = copy(given)
    rows: list[dict[str, Any] | None] = found.to_pylist()
    return rows


def test_rows_keep_their_order_and_rows_that_left_the_stream_are_not_passed() -> None:
    assert called(CODE, "1", None, "2") == [
        {"value": {"score": 1.0, "label": "1"}, "reason": None},
        None,
        {"value": {"score": 2.0, "label": "2"}, "reason": None},
    ]
    assert called(CODE, None) == [None]
    assert called(CODE) == []


@pytest.mark.parametrize(
    "result",
    [
        "pa.record_batch({'text': batch['text'], 'label': batch['text'], 'score': pa.array([1, 2])})",
        "pa.table({'label': batch['text'], 'score': pa.chunked_array([[1], [2]])})",
        "{'label': ('a', 'b'), 'score': np.array([1, 2])}",
    ],
)
def test_results_may_be_batches_tables_and_dicts(result: str) -> None:
    code = f"import numpy as np\nimport pyarrow as pa\ndef score(batch):\n    return {result}\n"
    assert [row["value"]["score"] for row in called(code, "a", "b") if row] == [1.0, 2.0]


def test_only_the_rows_on_which_it_fails_have_a_reason_with_the_line() -> None:
    found = called(CODE, *map(str, range(9)), "x", *map(str, range(9)), "")
    reasons = {at: row["reason"] for at, row in enumerate(found) if row is not None and row["reason"]}
    assert reasons == {
        9: "score.py, line 4: ValueError: invalid literal for int() with base 10: 'x'",
        19: "score.py, line 4: ValueError: invalid literal for int() with base 10: ''",
    }
    assert [row["value"]["score"] for row in found if row and not row["reason"]] == [*range(9)] * 2


def test_a_reason_is_unicode() -> None:
    (row,) = called("def score(batch):\n    raise ValueError('half \\ud83d')\n", "a")
    assert row is not None
    assert row["reason"] == r"score.py, line 2: ValueError: half \ud83d"


def test_a_value_of_another_type_fails_its_row() -> None:
    code = """\
def score(batch):
    return {"label": batch["text"], "score": [t if t == "x" else 1 for t in batch["text"].to_pylist()]}
"""
    first, second = called(code, "x", "1")
    assert first is not None
    assert second == {"value": {"score": 1.0, "label": "1"}, "reason": None}
    assert str(first["reason"]).startswith("score.py: column 'score' cannot be converted to double: ")


def test_a_text_that_is_not_utf8_fails_its_row() -> None:
    # Arrow does not check the bytes, and programs do not read a table that has them.
    code = """\
import pyarrow as pa

def score(batch):
    texts = [b"\\xff" if text == "x" else text.encode() for text in batch["text"].to_pylist()]
    return {"score": [1] * len(texts), "label": pa.array(texts, pa.binary()).view(pa.string())}
"""
    first, second = called(code, "x", "1")
    assert first is not None
    assert "column 'label' cannot be converted to string: Invalid UTF8" in str(first["reason"]).replace("Invalid: ", "")
    assert second == {"value": {"score": 1.0, "label": "1"}, "reason": None}


def test_a_function_that_exits_fails_its_row_and_does_not_end_the_worker() -> None:
    code = "import sys\n" + CODE.replace(
        "    numbers", "    if 'x' in batch['text'].to_pylist(): sys.exit('no x')\n    numbers"
    )
    first, second = called(code, "x", "1")
    assert first is not None
    assert first["reason"] == "score.py, line 5: SystemExit: no x"
    assert second == {"value": {"score": 1.0, "label": "1"}, "reason": None}


def test_the_run_stops_if_the_step_says_so() -> None:
    with pytest.raises(PenstockError, match=r"step 'scored': score\.py, line 4: ValueError") as caught:
        called(CODE, "1", "x", stops=True)
    assert "on_error: fail" in str(caught.value.why)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("{'score': [1], 'label': ['a']}", "returned 1 rows of column 'score' for a batch of 2"),
        ("{'score': 1, 'label': ['a', 'b']}", "returned a single value of column 'score'"),
        ("{'score': [1, 2], 'label': 'ab'}", "returned a single value of column 'label'"),
        ("{'score': [1, 2]}", "returned no column 'label', only score"),
        ("{'score': [1, 2], 'label': ['a', 'b'], 'more': [1, 2]}", "returned a column 'more'"),
        ("None", "score in score.py returned NoneType"),
    ],
)
def test_a_wrong_result_is_an_error_of_the_function_not_of_rows(result: str, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        called(f"def score(batch):\n    return {result}\n", "a", "b")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_package\n" + CODE, "score.py, line 1: ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise SystemExit(1)\n" + CODE, "score.py, line 1: SystemExit: 1"),
        ("score = 5\n", "'score' in score.py is not a function"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named(code: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        function(code).load()


FILE = """\
name: scored
source: {topics: [telemetry]}
steps:
  - {name: parsed, parse: {schema: "text STRING, more INT"}}
  - name: scored
    python: {file: score.py, function: score, input: [text], schema: "score DOUBLE NOT NULL, more STRING"}
  - {name: high, filter: score > 0.5}
sinks:
  - {name: rows, table: {path: lake/rows}}
"""


def pipeline(directory: Path, text: str = FILE, code: str = CODE) -> Pipeline:
    (directory / "score.py").write_text(code)
    (directory / "p.yaml").write_text(text)
    return load(directory / "p.yaml")


@pytest.mark.parametrize(
    ("old", "new", "code", "message"),
    [
        ("score.py", "none.py", CODE, r"steps\[1\].python.*expected a readable file: .*none.py"),
        ("", "", "def score(batch)\n    return 1", "expected Python in score.py:1: expected ':'"),
        ("", "", "def other(batch): ...", "expected a function 'score' in score.py, which has other"),
        ("", "", "async def score(batch): ...", "expected a plain function; 'score' in score.py is asynchronous"),
        ("input: [text]", "input: [txt]", CODE, r"python.input\[0\]': got 'txt', expected a column of 'parsed': text"),
        ("score DOUBLE NOT NULL", "score DUBLE", CODE, r"python.schema.*did you mean DOUBLE"),
        ("score DOUBLE NOT NULL", "score VARIANT", CODE, "expected no VARIANT with a Python function; 'score' is one"),
        ("score > 0.5", "scor > 0.5", CODE, "'scor' does not exist"),
        ("on_error", "on_error", CODE, None),
    ],
)
def test_the_file_is_checked_without_running_it(
    tmp_path: Path, old: str, new: str, code: str, message: str | None
) -> None:
    if message is None:
        assert pipeline(tmp_path, FILE, "raise RuntimeError\n" + code).steps[1].kind == "python"
        return
    with pytest.raises(ConfigError, match=message):
        pipeline(tmp_path, FILE.replace(old, new, 1), code)


def test_a_change_of_the_code_is_a_change_of_the_plan(tmp_path: Path) -> None:
    from penstock.pipelines.ledger import plan_changes

    before = description.as_data(pipeline(tmp_path))
    after = description.as_data(pipeline(tmp_path, code=CODE + "# another\n"))
    (change,) = plan_changes._steps(before, after)
    assert (change.mark, change.what) == (CHANGED, "step scored")
    assert change.text.count("score of text in score.py (SHA-256 ") == 2
