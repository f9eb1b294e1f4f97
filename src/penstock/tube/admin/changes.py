"""Changes by the master's administration: formats of rows and responses, shared checks, and the batch forms.

A batch is a JSON array of objects, each with the parameters of one change. If an object is invalid, the whole batch is
refused. Parameters next to the array (author, time) apply to all objects. Later objects apply after the changes of
earlier ones: a topic has an object for each of its brokers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.tube.admin.request import BadParameter, Params, format_time, parse_json
from penstock.tube.codec.strings import UNDEFINED
from penstock.tube.engine.broker.flow_control import parse_rules
from penstock.tube.engine.master.master import MIN_MESSAGE_BYTES, MasterEngine
from penstock.tube.engine.master.settings import (
    TOPIC_KIND,
    Removal,
    Setting,
    TopicDefaults,
    key_of,
    kind_of,
)

__all__ = [
    "AUTHOR",
    "MAX_PARTITIONS",
    "MAX_STORES",
    "NOT_USED",
    "Answer",
    "MakeChange",
    "SettingChange",
    "batch",
    "delete_policy",
    "failure",
    "flow_rules",
    "flow_text",
    "has_properties",
    "item",
    "message_bytes",
    "modification",
    "refuse_unchangeable",
    "success",
    "topic_defaults",
]

Answer = dict[str, Any]
DELETE_WHEN = "0 0 6,18 * * ?"
"""The reference's default, which scripts send unchanged."""
MAX_PARTITIONS = 9999
MAX_STORES = 1000
_DELETE_POLICY = re.compile(r"delete,(\d{1,6})([smhSMH]?)", re.ASCII)
_MAX_HOURS = 168
_SECONDS = {"s": 1, "m": 60, "h": 3600, "": 3600}  # a number without a unit is hours, as in the reference

NOT_USED: Answer = {
    "unflushThreshold": 1000,
    "unflushInterval": 10_000,
    "unflushDataHold": 0,
    "memCacheMsgSizeInMB": 3,
    "memCacheMsgCntInK": 10,
    "memCacheFlushIntvl": 20_000,
    "dataStoreType": UNDEFINED,
    "dataPath": "",
}
"""Fields that tools expect for each topic and broker: the reference's defaults. They have no effect."""


_UNCHANGEABLE = (
    ("unflushThreshold", "unfDskMsgCnt"),
    ("unflushInterval", "unfDskInt"),
    ("unflushDataHold", "unfDskDataSize"),
    ("memCacheMsgSizeInMB", "cacheSizeInMB"),
    ("memCacheMsgCntInK", "unfMemMsgCnt"),
    ("memCacheFlushIntvl", "unfMemInt"),
    ("dataStoreType", "dStType"),
    ("dataPath", "dPath"),
)


def refuse_unchangeable(params: Params) -> None:
    """Refuse properties that have no effect here, unless they have the value that queries show.

    Raises BadParameter.
    """
    for names in _UNCHANGEABLE:
        text = params.text(*names)
        if text not in {"", str(NOT_USED[names[0]])}:
            raise BadParameter(
                f"{names[0]} {text}: this broker has no such setting, a message is committed when it is acknowledged;"
                f" omit it, or set {NOT_USED[names[0]]}"
            )
    text = params.text("deleteWhen", "dWhen")
    if text not in {"", DELETE_WHEN}:
        raise BadParameter(f"deleteWhen {text!r}: expired segments are deleted every minute; omit it")
    for name, only in (("regionId", "0"), ("groupId", "1")):
        if params.text(name) not in {"", only}:
            raise BadParameter(f"{name} {params.text(name)}: there is only {name} {only}")


AUTHOR = ("dataVersionId", "serialId", "createUser", "createDate", "modifyUser", "modifyDate")
"""Names of the fields of `modification`."""


class SettingChange(NamedTuple):
    """A change: ``settings`` to store and then to apply, and the ``answer`` to send afterwards."""

    settings: list[Setting | Removal]
    answer: Answer


def success(rows: Sequence[Answer | str]) -> Answer:
    """A successful response with ``rows`` as its data."""
    return {"result": True, "errCode": 0, "errMsg": "OK", "data": rows, "count": len(rows)}


def modification(engine: MasterEngine, kind: type[Setting], key: str, serial: int = UNDEFINED) -> Answer:
    """Return authors and times of the setting with that kind and key; ``-`` if it was not set by administration
    requests."""
    found = engine.controls.authors.get((kind_of(kind), key))
    if found is None:
        said = dict.fromkeys(["createUser", "createDate", "modifyUser", "modifyDate"], "-")
    else:
        said = {
            "createUser": found.create_user,
            "createDate": format_time(found.create_ms),
            "modifyUser": found.modify_user,
            "modifyDate": format_time(found.modify_ms),
        }
    return {"dataVersionId": serial, "serialId": serial, **said}


def flow_rules(text: str) -> Answer:
    """Return the flow control rules in ``text``, and their number."""
    rules = json.loads(text) if text.strip() else []
    return {"flowCtrlRuleCount": sum(len(kind.get("rule", ())) for kind in rules), "flowCtrlInfo": rules}


def failure(text: str) -> Answer:
    """Response to a request that failed as a whole."""
    return {"result": False, "errCode": 400, "errMsg": text}


def item(code: int = 200, text: str = "Ok!", **names: Any) -> Answer:
    """Result of a change for one target; code 200 or 201 is success."""
    return {**names, "success": code in {200, 201}, "errCode": code, "errInfo": text}


def message_bytes(params: Params) -> int | None:
    """Return the parameter maxMsgSizeInMB in bytes; None if it is missing."""
    size = params.number("maxMsgSizeInMB", default=0, least=0, most=20)
    return size * MIN_MESSAGE_BYTES or None


def flow_text(params: Params, present: str) -> str:
    """Return the validated flowCtrlInfo; ``present`` if it is missing."""
    text = params.text("flowCtrlInfo", "flowCtrlSet")
    if not text:
        return present
    try:
        parse_rules(text)
    except ConfigError as error:
        raise BadParameter(f"flowCtrlInfo: {error.what}") from None
    parse_json(text, "flowCtrlInfo")
    return text


def delete_policy(params: Params) -> str | None:
    """Return the validated deletePolicy; None if it is missing."""
    text = params.text("deletePolicy", "delPolicy")
    if not text:
        return None
    match = _DELETE_POLICY.fullmatch(text)
    if match is None or not 0 < int(match[1]) * _SECONDS[match[2].lower()] <= _MAX_HOURS * 3600:
        raise BadParameter(f"deletePolicy {text!r}: delete,<number>[s|m|h] of at most {_MAX_HOURS} hours is possible")
    return text


_PROPERTIES = (
    ("numPartitions", "numPart"),
    ("numTopicStores", "numStore"),
    ("acceptPublish", "accPub"),
    ("acceptSubscribe", "accSub"),
    ("deletePolicy", "delPolicy"),
    ("unflushThreshold", "unfDskMsgCnt"),
    ("unflushInterval", "unfDskInt"),
    ("unflushDataHold", "unfDskDataSize"),
    ("memCacheMsgSizeInMB", "cacheSizeInMB"),
    ("memCacheMsgCntInK", "unfMemMsgCnt"),
    ("memCacheFlushIntvl", "unfMemInt"),
)


def has_properties(row: Answer, params: Params) -> bool:
    """Return True if ``row`` has the topic properties that the query selects."""
    return all(
        json.dumps(row[names[0]]).strip('"') in {"", text.lower()}
        for names in _PROPERTIES
        if (text := params.text(*names))
    )


def topic_defaults(params: Params, present: TopicDefaults) -> TopicDefaults:
    """Defaults of new topics from the parameters; ``present`` for missing ones."""
    given = TopicDefaults(
        params.given_number("numPartitions", "numPart", least=1, most=MAX_PARTITIONS),
        params.given_number("numTopicStores", "numStore", least=1, most=MAX_STORES),
        delete_policy(params),
        params.given_flag("acceptPublish", "accPub"),
        params.given_flag("acceptSubscribe", "accSub"),
    )
    return given.with_fallback(present)


MAX_OBJECTS = 1000
_JSON_TEXTS = frozenset({"flowCtrlInfo", "flowCtrlSet"})
_NAMES = ("brokerId", "brokerIp", "topicName", "groupName")

MakeChange = Callable[[MasterEngine, Params, int], SettingChange]


def batch(run: MakeChange, *names: str) -> MakeChange:
    """Return the batch form of ``run``, which runs for each object of the array in the parameter with one of
    ``names``."""

    def together(engine: MasterEngine, params: Params, now: int) -> SettingChange:
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
            # A topic has an object per broker. For any other setting, the second object would silently replace the
            # first.
            if any(kind != TOPIC_KIND for kind, _ in keys & changed.keys()):
                told: dict[str, Any] = {name: given[name] for name in _NAMES if name in given}
                if told.get("brokerId", "").isdecimal():
                    told["brokerId"] = int(told["brokerId"])
                rows.append(item(408, "the batch has it twice, with different properties", **told))
                continue
            changed |= {key_of(setting): setting for setting in change.settings}
            rows += change.answer["data"]
        return SettingChange(list(changed.values()), success(rows))

    together.__doc__ = f"{(run.__doc__ or '').strip().splitlines()[0].rstrip('.')}: several at once, in `{names[0]}`."
    return together


def _objects(params: Params, names: tuple[str, ...]) -> Iterable[Mapping[str, str]]:
    found = parse_json(params.required(*names), names[0])
    if not isinstance(found, list) or not found or not all(isinstance(entry, dict) for entry in found):
        raise BadParameter(f"{names[0]}: an array of objects is expected")
    if len(found) > MAX_OBJECTS:
        raise BadParameter(f"{names[0]} has {len(found)} objects, at most {MAX_OBJECTS} are possible")
    for entry in found:
        yield {name: _text(names[0], name, value) for name, value in entry.items() if value is not None}


def _text(array: str, name: str, value: Any) -> str:
    """Convert a JSON value to the text of a form parameter."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | dict):
        if name in _JSON_TEXTS:
            return json.dumps(value, separators=(",", ":"))
        if isinstance(value, list) and all(isinstance(entry, str | int) for entry in value):
            return ",".join(map(str, value))
        raise BadParameter(f"{array}: {name}: a text or a number is expected")
    return str(value)
