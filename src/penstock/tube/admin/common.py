"""What the master's administration methods share: the shapes of rows and answers, and a change to make durable."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.tube.admin.params import BadParameter, Params
from penstock.tube.codec.strings import UNDEFINED
from penstock.tube.engine.flow import parse_rules
from penstock.tube.engine.master import MIN_MESSAGE_BYTES
from penstock.tube.engine.settings import Removal, Setting, TopicDefaults

__all__ = [
    "MAX_PARTITIONS",
    "MAX_STORES",
    "NOT_USED",
    "Answer",
    "Change",
    "delete_policy",
    "failure",
    "flow_rules",
    "flow_text",
    "has_properties",
    "item",
    "message_bytes",
    "success",
    "topic_defaults",
    "who_and_when",
]


Answer = dict[str, Any]
MAX_PARTITIONS = 9999
MAX_STORES = 1000
_DELETE_POLICY = re.compile(r"delete,(\d{1,6})([smhSMH]?)", re.ASCII)
_MAX_HOURS = 168
_SECONDS = {"s": 1, "m": 60, "h": 3600, "": 3600}

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
"""What tools expect to read of each topic and broker: the reference's defaults. Nothing here depends on them."""


class Change(NamedTuple):
    """``settings`` to make durable, then to tell the engine; ``answer`` to send after that."""

    settings: list[Setting | Removal]
    answer: Answer


def success(rows: Sequence[Answer | str]) -> Answer:
    """The answer with ``rows`` as its data."""
    return {"result": True, "errCode": 0, "errMsg": "OK", "data": rows, "count": len(rows)}


def who_and_when(serial: int = UNDEFINED) -> Answer:
    """Fields of a setting that tools expect; who changed it, and when, is not kept here."""
    unknown = dict.fromkeys(["createUser", "createDate", "modifyUser", "modifyDate"], "-")
    return {"dataVersionId": serial, "serialId": serial, **unknown}


def flow_rules(text: str, counted: str) -> Answer:
    """The rules of ``text`` and how many there are, the latter under the name ``counted``."""
    rules = json.loads(text) if text.strip() else []
    return {counted: sum(len(kind.get("rule", ())) for kind in rules), "flowCtrlInfo": rules}


def failure(text: str) -> Answer:
    """The answer to what cannot be done as a whole."""
    return {"result": False, "errCode": 400, "errMsg": text}


def item(code: int = 200, text: str = "Ok!", **names: Any) -> Answer:
    """What became of one target of a change; code 200 or 201 is success."""
    return {**names, "success": code in {200, 201}, "errCode": code, "errInfo": text}


def message_bytes(params: Params) -> int | None:
    """maxMsgSizeInMB in bytes; None if it is not there."""
    size = params.number("maxMsgSizeInMB", default=0, least=0, most=20)
    return size * MIN_MESSAGE_BYTES or None


def flow_text(params: Params, present: str) -> str:
    """flowCtrlInfo, checked; ``present`` if it is not there."""
    text = params.text("flowCtrlInfo", "flowCtrlSet")
    if not text:
        return present
    try:
        parse_rules(text)
    except ConfigError as error:
        raise BadParameter(f"flowCtrlInfo: {error.what}") from None
    return text


def delete_policy(params: Params) -> str | None:
    """deletePolicy, checked; None if it is not there."""
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
    """Whether ``row`` has the properties of topics that a query asks for."""
    return all(
        json.dumps(row[names[0]]).strip('"') in {"", text.lower()}
        for names in _PROPERTIES
        if (text := params.text(*names))
    )


def topic_defaults(params: Params, present: TopicDefaults) -> TopicDefaults:
    """The properties that topics get which are made without them; ``present`` where nothing is said."""
    given = TopicDefaults(
        params.given_number("numPartitions", "numPart", least=1, most=MAX_PARTITIONS),
        params.given_number("numTopicStores", "numStore", least=1, most=MAX_STORES),
        delete_policy(params),
        params.given_flag("acceptPublish", "accPub"),
        params.given_flag("acceptSubscribe", "accSub"),
    )
    return given.over(present)
