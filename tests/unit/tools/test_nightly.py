"""A part of the nightly tests ends in time, and its next run continues there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import nightly

TESTS = """\
import pathlib
import pytest

pytestmark = pytest.mark.nightly


class TestFirst:
    @pytest.mark.parametrize("text", ["a::b", "c[d]"])
    def test_passes(self, text, record_property):
        record_property("summary", f"saw {text}")
        assert text


def test_is_interrupted():
    if not pathlib.Path("second-run").exists():
        raise KeyboardInterrupt


def test_fails():
    raise AssertionError("no")


def test_is_skipped():
    pytest.skip("has no reason")
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers = nightly: x\nfilterwarnings = error:record_property\n", encoding="utf-8"
    )
    folder = tmp_path / "tests" / "slow"
    folder.mkdir(parents=True)
    (folder / "test_slow.py").write_text(TESTS, encoding="utf-8")
    monkeypatch.setitem(nightly.PARTS, "slow", ["tests/slow"])
    return tmp_path


def test_an_interrupted_part_continues_with_the_test_that_was_interrupted(root: Path) -> None:
    cursor = root / "cursor.json"
    tests, results = nightly.run_part("slow", cursor, 60.0, root)
    first = [f"tests/slow/test_slow.py::TestFirst::test_passes[{text}]" for text in ("a::b", "c[d]")]
    assert tests[:2] == first
    assert {test: (result["outcome"], result["message"]) for test, result in results.items()} == {
        first[0]: ("passed", "saw a::b"),
        first[1]: ("passed", "saw c[d]"),
    }
    (root / "second-run").touch()
    _, results = nightly.run_part("slow", cursor, 60.0, root)
    assert [result["outcome"] for result in results.values()] == ["passed", "passed", "passed", "failed", "skipped"]
    lines = nightly.summary("slow", tests, results)
    assert lines[-1] == "3 passed, 1 failed, 1 skipped"
    assert lines[-2].endswith("0 of 5 tests not run yet")
    assert any("has no reason" in line for line in lines)
    # A part that is complete begins again.
    _, results = nightly.run_part("slow", cursor, 60.0, root)
    assert len(results) == 5
