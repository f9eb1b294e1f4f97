"""The end of a replay is resolved once."""

from __future__ import annotations

from pathlib import Path

from penstock.pipelines.sources.readers import _stored_end
from penstock.pipelines.spec.sources import SOURCE
from penstock.pipelines.state_dir.checkpoint import Offsets


def test_of_two_threads_that_resolve_it_the_first_one_decides(tmp_path: Path) -> None:
    def later() -> Offsets:
        assert _stored_end(tmp_path, SOURCE, lambda: {"t": {"0": 5}}) == {"t": {"0": 5}}
        return {"t": {"0": 7}}

    assert _stored_end(tmp_path, SOURCE, later) == {"t": {"0": 5}}
