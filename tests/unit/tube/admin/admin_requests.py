"""A master's administration as its shell uses it."""

from __future__ import annotations

from typing import Any

from penstock.tube.admin.master import SettingChange, handle
from penstock.tube.engine.master.master import MasterEngine
from tests.engine.tube.master_harness import NOW

__all__ = ["TOKEN", "change", "query"]

TOKEN = "secret"


def query(engine: MasterEngine, method: str, **params: str) -> dict[str, Any]:
    answer = handle(engine, {"method": method, **params}, TOKEN, NOW)
    assert isinstance(answer, dict)
    return answer


def change(engine: MasterEngine, method: str, **params: str) -> dict[str, Any]:
    """Carry the change out as the shell does."""
    answer = handle(engine, {"method": method, "confModAuthToken": TOKEN, "createUser": "u", **params}, TOKEN, NOW)
    assert isinstance(answer, SettingChange)
    for setting in answer.settings:
        engine.stored(setting, NOW)
    return answer.answer
