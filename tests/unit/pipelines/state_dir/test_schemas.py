"""Schemas of a registry in the state directory: every attempt of a batch decides the same about an id."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.pipelines.state_dir.checkpoint import Checkpoint
from penstock.pipelines.state_dir.schemas import BatchSchemas, StoredSchema, decided_schemas, remove_old_decisions

INT = StoredSchema('"int"')
UNKNOWN = StoredSchema(None)


def begin(tmp_path: Path, **batches: int) -> BatchSchemas:
    given = [(tmp_path / sink, batch) for sink, batch in batches.items()]
    return BatchSchemas.parse(BatchSchemas.begin(tmp_path, ["ab"], given).as_text())


def not_asked() -> StoredSchema:
    raise AssertionError("the registry is not asked again")


def test_a_schema_is_looked_up_once(tmp_path: Path) -> None:
    other = StoredSchema("syntax", "PROTOBUF", ("other",))
    assert begin(tmp_path, rows=0).find("ab", 7, lambda: other) == other
    assert begin(tmp_path, rows=0).find("ab", 7, not_asked) == other
    later = begin(tmp_path, rows=5, other=3)
    assert later.known == {"ab-7"}
    assert later.find("ab", 7, not_asked) == other
    assert decided_schemas(tmp_path / "rows", 5) == {}


def test_an_unknown_id_stays_unknown_for_its_batch(tmp_path: Path) -> None:
    """Also if it is registered, and stored by another batch, before the next attempt."""
    assert begin(tmp_path, rows=4).find("ab", 7, lambda: UNKNOWN) == UNKNOWN
    assert begin(tmp_path, rows=5).find("ab", 7, lambda: INT) == INT
    again = begin(tmp_path, rows=4)
    assert again.known == set()
    assert again.find("ab", 7, not_asked) == UNKNOWN
    assert begin(tmp_path, rows=6).find("ab", 7, not_asked) == INT
    remove_old_decisions(tmp_path / "rows", 6)
    assert (decided_schemas(tmp_path / "rows", 4), len(decided_schemas(tmp_path / "rows", 5))) == ({}, 1)


@pytest.mark.parametrize(("first", "second"), [(UNKNOWN, INT), (INT, UNKNOWN)])
def test_the_first_of_two_tasks_decides(tmp_path: Path, first: StoredSchema, second: StoredSchema) -> None:
    """The id is registered, or deleted, between their requests; the second asks before the first has decided."""
    one, two = begin(tmp_path, rows=0, other=3), begin(tmp_path, rows=0, other=3)

    def slow() -> StoredSchema:
        assert one.find("ab", 7, lambda: first) == first
        return second

    assert two.find("ab", 7, slow) == first
    assert begin(tmp_path, rows=0).find("ab", 7, not_asked) == first
    assert begin(tmp_path, other=3).find("ab", 7, not_asked) == first


def test_after_a_limit_the_ids_that_are_stored_are_the_only_decision(tmp_path: Path) -> None:
    """Also if others are registered and stored before a later attempt, and for an id that a killed task has decided."""
    first = begin(tmp_path, rows=4, other=3)
    assert first.find("ab", 1, lambda: INT) == INT
    assert first.find("ab", 7, lambda: UNKNOWN) == UNKNOWN
    (tmp_path / "schemas" / "ab" / "1.json").unlink()
    assert begin(tmp_path, rows=3).find("ab", 2, lambda: INT) == INT
    assert "more than 100 schema ids" in first.limit().what
    # A task of the attempt that failed still decides.
    assert first.find("ab", 3, lambda: INT) == INT
    limited = begin(tmp_path, rows=4, other=3)
    assert limited.limited
    assert limited.known == {"ab-1", "ab-2", "ab-3"}
    assert first.find("ab", 8, lambda: INT) == INT
    for again in (limited, begin(tmp_path, rows=4, other=3), begin(tmp_path, rows=4), begin(tmp_path, other=3)):
        assert again.limited
        found = [again.find("ab", schema_id, not_asked) for schema_id in (1, 2, 3, 7, 8, 9)]
        assert found == [INT, INT, INT, UNKNOWN, UNKNOWN, UNKNOWN]
    assert not begin(tmp_path, rows=5, other=4).limited
    remove_old_decisions(tmp_path / "rows", 6)
    assert list((tmp_path / "rows" / "schemas").iterdir()) == []


def test_sinks_with_a_limit_share_a_query_with_those_that_have_it(tmp_path: Path) -> None:
    """A crash while the limit is stored."""
    keys = []
    for sink in ("rows", "other"):
        checkpoint = Checkpoint(tmp_path / sink)
        checkpoint.begin(0, 'v1\n{"batchWatermarkMs":0}\n{"t":{"1:0":5}}')
        begin(tmp_path, **{sink: 0}).limit()
        keys.append(checkpoint.position().key)
    assert keys[0] == keys[1]
    assert begin(tmp_path, rows=0).limited
    assert Checkpoint(tmp_path / "rows").position().key != keys[1]
    begin(tmp_path, rows=1).find("ab", 5, lambda: INT)
    assert begin(tmp_path, other=0).known == {"ab-5"}
    with pytest.raises(StorageError, match="decided differently about the schema ids"):
        begin(tmp_path, rows=0, other=0)


def test_sinks_that_begin_to_share_a_query_use_the_decision_of_the_one_that_has_it(tmp_path: Path) -> None:
    begin(tmp_path, other=3).find("ab", 7, lambda: UNKNOWN)
    assert begin(tmp_path, rows=0, other=3).find("ab", 7, not_asked) == UNKNOWN
    assert begin(tmp_path, rows=0).find("ab", 7, not_asked) == UNKNOWN


def test_sinks_with_different_decisions_do_not_share_a_query(tmp_path: Path) -> None:
    positions = []
    for sink, found in (("rows", UNKNOWN), ("other", INT)):
        checkpoint = Checkpoint(tmp_path / sink)
        checkpoint.begin(0, 'v1\n{"batchWatermarkMs":0}\n{"t":{"1:0":5}}')
        begin(tmp_path, **{sink: 0}).find("ab", 7, lambda found=found: found)  # type: ignore[misc]
        positions.append(checkpoint.position())
    assert positions[0].key != positions[1].key
    with pytest.raises(StorageError, match="decided differently about the schema id 7"):
        begin(tmp_path, rows=0, other=0).find("ab", 7, not_asked)


def test_registries_have_ids_of_their_own(tmp_path: Path) -> None:
    known = begin(tmp_path, rows=0)
    assert known.find("ab", 7, lambda: UNKNOWN) == UNKNOWN
    assert known.find("cd", 7, lambda: INT) == INT


def test_a_test_case_has_its_own_schemas() -> None:
    known = BatchSchemas.parse(BatchSchemas(None, fixed={"7": '"int"'}).as_text())
    assert known.find("ab", 7, not_asked) == INT
    assert known.find("ab", 8, not_asked) == UNKNOWN
