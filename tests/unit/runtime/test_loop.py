"""The loop that runs a process, and what start-up sets."""

from __future__ import annotations

import asyncio
import gc
import resource
import sys

import pytest

from penstock.runtime.io import loop


async def _kind() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_uvloop_is_used_unless_the_plain_loop_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_LOOP", raising=False)
    assert loop.loop_name() == "uvloop"
    assert loop.run(_kind()) == "uvloop"
    monkeypatch.setenv("PENSTOCK_LOOP", "asyncio")
    assert loop.loop_name() == "asyncio"
    assert loop.run(_kind()).startswith("asyncio")


def test_the_plain_loop_serves_where_uvloop_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop.loop_name() == "asyncio"
    assert loop.run(_kind()).startswith("asyncio")


def test_start_up_settings_take_effect_and_can_be_repeated() -> None:
    interval, thresholds, frozen = sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()
    try:
        loop.tune_process()
        loop.tune_process()
        assert sys.getswitchinterval() == pytest.approx(0.0005)
        loop.freeze_memory()
        assert gc.get_freeze_count() > frozen
        assert gc.get_threshold()[2] == 100
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def test_the_limit_of_descriptors_is_raised_as_far_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    most = loop.MOST_DESCRIPTORS
    for have, wanted in (
        ((1024, 4096), (4096, 4096)),
        ((1024, resource.RLIM_INFINITY), (most, resource.RLIM_INFINITY)),
        ((4096, 4096), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ):
        said: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _, have=have: have)
        monkeypatch.setattr(resource, "setrlimit", lambda _, limits, said=said: said.append(limits))
        loop._raise_descriptor_limit()
        assert said == ([] if wanted is None else [wanted])


def test_a_limit_that_cannot_be_raised_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def refuse(_: int, limits: tuple[int, int]) -> None:
        asked.append(limits)
        raise ValueError("not allowed")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    loop._raise_descriptor_limit()
    assert asked == [(4096, 4096)]
