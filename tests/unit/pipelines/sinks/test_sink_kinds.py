"""Every kind of sink is handled by every module that ARCHITECTURE.md names for "a pipeline sink"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest

from penstock.pipelines.ledger.reconcile import COMPARISONS
from penstock.pipelines.sinks.delivery import DELIVERY
from penstock.pipelines.spec.columns import SINK_COLUMNS
from penstock.pipelines.spec.description import SINK_DESCRIPTIONS
from penstock.pipelines.spec.sinks import SINK_KINDS, Sink

ROOT = Path(__file__).resolve().parents[4]

TABLES: dict[str, Mapping[str, object]] = {
    "pipelines/spec/description.py": SINK_DESCRIPTIONS,
    "pipelines/spec/columns.py": SINK_COLUMNS,
    "pipelines/sinks/delivery.py": DELIVERY,
    "pipelines/ledger/reconcile.py": COMPARISONS,
}


def test_each_kind_is_a_field_of_a_sink() -> None:
    assert set(SINK_KINDS) == set(Sink.model_fields) - {"name", "source"}


@pytest.mark.parametrize("module", TABLES)
def test_the_table_has_each_kind(module: str) -> None:
    assert set(TABLES[module]) == set(SINK_KINDS)


def test_the_row_of_the_architecture_names_these_modules() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| a pipeline sink |"))
    named = re.findall(r"`([a-z_/]+\.py)`", row)
    assert set(TABLES) <= set(named)
    assert "pipelines/spec/sinks.py" in named


def test_every_sink_of_files_is_found_by_its_path() -> None:
    """Replays and the checks of paths know a sink of files by ``Sink.path`` alone."""
    models = {kind: Sink.model_fields[kind].annotation for kind in SINK_KINDS}
    of_files = [kind for kind, model in models.items() if "path" in get_args(model)[0].model_fields]
    assert "table" in of_files
    for kind in of_files:
        sink = Sink.model_validate({"name": "s", kind: {"path": "a"}})
        assert sink.path == "a"
        assert sink.with_path("b").path == "b"
        assert sink.path == "a"
    assert Sink.model_validate({"name": "s", "console": {}}).path is None
