"""The batch forms of changes: a JSON array of objects, each the parameters of one change.

All or nothing as far as the request can be judged before it is done: an object that cannot be read refuses the batch.
Parameters beside the array (who asks, when) are for all objects. What
earlier objects make of a topic is what later ones find: a topic has an object for each of its brokers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.tube.admin.common import Change, item, success
from penstock.tube.admin.params import BadParameter, Params
from penstock.tube.engine.master.master import MasterEngine
from penstock.tube.engine.master.settings import (
    TOPIC_KIND,
    Removal,
    Setting,
    key_of,
)

__all__ = ["Run", "batch"]

MAX_OBJECTS = 1000
_JSON_TEXTS = frozenset({"flowCtrlInfo", "flowCtrlSet"})
_NAMES = ("brokerId", "brokerIp", "topicName", "groupName")

Run = Callable[[MasterEngine, Params, int], Change]


def batch(run: Run, *names: str) -> Run:
    """``run`` once for each object of the array that is given by one of ``names``."""

    def together(engine: MasterEngine, params: Params, now: int) -> Change:
        changed: dict[tuple[str, str], Setting | Removal] = {}
        rows: list[dict[str, Any]] = []
        for given in _objects(params, names):
            inner = params.of_object(given, changed)
            try:
                change = run(engine, inner, now)
                if change.settings:
                    inner.check_unused(names)
            except BadParameter as error:
                raise BadParameter(f"{names[0]}: {error}, in {json.dumps(given, ensure_ascii=False)}") from None
            keys = {key_of(setting) for setting in change.settings}
            if any(kind != TOPIC_KIND for kind, _ in keys & changed.keys()):
                told: dict[str, Any] = {name: given[name] for name in _NAMES if name in given}
                if told.get("brokerId", "").isdecimal():
                    told["brokerId"] = int(told["brokerId"])
                rows.append(item(408, "the batch has it twice, with different properties", **told))
                continue
            changed |= {key_of(setting): setting for setting in change.settings}
            rows += change.answer["data"]
        return Change(list(changed.values()), success(rows))

    together.__doc__ = f"{(run.__doc__ or '').strip().splitlines()[0].rstrip('.')}: several at once, in `{names[0]}`."
    return together


def _objects(params: Params, names: tuple[str, ...]) -> Iterable[Mapping[str, str]]:
    text = params.required(*names)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise BadParameter(f"{names[0]} is not JSON") from None
    if not isinstance(found, list) or not found or not all(isinstance(entry, dict) for entry in found):
        raise BadParameter(f"{names[0]}: an array of objects is expected")
    if len(found) > MAX_OBJECTS:
        raise BadParameter(f"{names[0]} has {len(found)} objects, at most {MAX_OBJECTS} are possible")
    for entry in found:
        yield {name: _text(names[0], name, value) for name, value in entry.items() if value is not None}


def _text(array: str, name: str, value: Any) -> str:
    """A JSON value as the same parameter of a form."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | dict):
        if name in _JSON_TEXTS:
            return json.dumps(value, separators=(",", ":"))
        if isinstance(value, list) and all(isinstance(entry, str | int) for entry in value):
            return ",".join(map(str, value))
        raise BadParameter(f"{array}: {name}: a text or a number is expected")
    return str(value)
