"""Limits of master and broker as options of the node: one table of fields describes both."""

from __future__ import annotations

import dataclasses

import pydantic
import pytest

from penstock.node.config.node import NodeConfig, StagingSection
from penstock.node.config.tube import TubeLimitOptions, tube_limits
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.engine.transactions.staging import StagingLimits


def test_every_limit_is_an_option_with_its_default_and_text() -> None:
    assert set(TubeLimitOptions.model_fields) == {field.name for field in dataclasses.fields(TubeLimits)}
    assert all(field.description for field in TubeLimitOptions.model_fields.values())
    assert tube_limits(NodeConfig().tube.limits) == TubeLimits()
    changed = NodeConfig.model_validate({"tube": {"limits": {"max_connections": 5, "segment_bytes": 2 << 20}}})
    assert tube_limits(changed.tube.limits) == TubeLimits(max_connections=5, segment_bytes=2 << 20)


@pytest.mark.parametrize("wrong", [{"max_connections": 0}, {"segment_bytes": 1}, {"broker_session_ms": 10}, {"x": 1}])
def test_impossible_limits_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(pydantic.ValidationError):
        NodeConfig.model_validate({"tube": {"limits": wrong}})


def test_limits_of_staging() -> None:
    assert StagingSection().limits == StagingLimits()
    assert StagingSection(max_attempts=5, max_queries=6, forget="2h").limits == StagingLimits(
        max_attempts=5, max_queries=6, forget_ms=7_200_000
    )
