"""The HTTP administration as Apache's tools expect it: every method of 2.4.0, and in each answer what Apache's has.

``administration.json`` has the names that Apache's servers register, and the names and kinds of values in their
answers to queries, recorded with one topic, one group and its controls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.tube.admin.broker import METHODS as BROKER
from penstock.tube.admin.broker import BrokerAdmin, handle
from penstock.tube.admin.master import METHODS as MASTER
from penstock.tube.admin.request import Caller, Role
from penstock.tube.codec.message import encode_data
from penstock.tube.codec.methods import MethodId
from penstock.tube.engine.client.consumer_state import Membership
from penstock.tube.engine.master.master import MasterEngine
from tests.engine.tube.broker_harness import NOW as BROKER_NOW
from tests.engine.tube.broker_harness import Talk
from tests.engine.tube.master_harness import NOW, ask, join_broker, master
from tests.unit.tube.admin.admin_requests import change, query

RECORDED = json.loads((Path(__file__).parents[2] / "vectors/tubemq/administration.json").read_text(encoding="utf-8"))
ANSWERS = RECORDED["answers"]

# What ours do not have: who connected from where, the state of one reader's flow control, one node's history; or have
# only at times: a step while a broker is behind, the port of an administration that somebody named.
OF_A_READER = {
    f"dataSet[].{name}"
    for name in ("receivedFrom", "curDataLimitInM", "curFreqLimit", "totalSentSec", "isSupportLimit", "sentUnitSec",
                 "totalSentMin", "sentUnit")
}  # fmt: skip
LEFT_OUT = {
    "master admin_query_broker_run_status": {"data[].stepOp", "data[].brokerWebPort"},
    "master admin_query_consume_group_detail": {"data[].receivedFrom", "data[].isOverTLS"},
    "master admin_query_master_group_info": {"data[].statusInfo.joinTime"},
    "broker admin_query_broker_all_consumer_info": OF_A_READER,
    "broker admin_get_group_detail_info": OF_A_READER,
}


def test_every_method_of_the_reference_is_answered() -> None:
    assert set(RECORDED["master"]) <= set(MASTER)
    assert set(RECORDED["broker"]) <= set(BROKER)


def running_master() -> MasterEngine:
    engine = master()
    join_broker(engine)
    ask(engine, MethodId.CONSUMER_REGISTER, Membership("c1", "h", "lake", ["demo"], {}, NOW).register())
    of_group = {"groupName": "lake", "topicName": "demo"}
    change(engine, "admin_set_topic_authorize_control", topicName="demo", isEnable="true")
    change(engine, "admin_add_group_csmctrl_info", **of_group, consumeEnable="true", filterConds="aa")
    change(engine, "admin_add_black_consumergroup_info", groupName="other", topicName="demo")
    change(engine, "admin_add_group_resctrl_info", groupName="lake", alwdBrokerClientRate="3")
    return engine


def running_broker() -> BrokerAdmin:
    talk = Talk()
    data, flag = encode_data(b"hello", "k=v")
    talk.send(data, flag=flag)
    talk.commit()
    talk.register()
    talk.get()
    talk.confirm()
    return BrokerAdmin(talk.engine, 1, lambda: {"produced_messages": 1}, BROKER_NOW)


def answer_of(side: str, method: str) -> Any:
    if side == "master":
        named = {"groupName": "lake"} if method == "admin_query_consume_group_detail" else {}
        return query(running_master(), method, **named)
    place = {"topicName": "demo", "groupName": "group", "partitionId": "0", "manualOffset": "0", "modifyUser": "me"}
    offsets = {"manualSet": "true", "offsetJsonInfo": '{"1:demo:0": 0}'}
    given = {**place, **offsets}
    only = BROKER[method].only | {"modifyUser"}
    if BROKER[method].changes:
        given = {name: value for name, value in given.items() if name in only}
    answer, _ = handle(running_broker(), {"method": method, **given}, None, Caller(role=Role.ADMINISTRATOR))
    return answer


def missing(recorded: Any, ours: Any, path: str = "") -> Iterator[str]:
    """Places where Apache's answer has something that ours lacks, or that is of another kind there."""
    if isinstance(recorded, dict):
        if not isinstance(ours, dict):
            yield path
            return
        for name, inner in recorded.items():
            place = f"{path}.{name}" if path else name
            if name not in ours:
                yield place
            else:
                yield from missing(inner, ours[name], place)
    elif isinstance(recorded, list):
        if not isinstance(ours, list) or (recorded and not ours):
            yield f"{path}[]"
        elif recorded:
            yield from missing(recorded[0], ours[0], f"{path}[]")
    elif {bool: "flag", int: "number", str: "text"}[type(ours)] != recorded:
        yield f"{path}: {ours!r} is no {recorded}"


@pytest.mark.parametrize("asked", ANSWERS)
def test_answers_have_the_fields_of_apaches_answers(asked: str) -> None:
    answer = answer_of(*asked.split())
    assert answer["result"], answer
    assert set(missing(ANSWERS[asked], answer)) == LEFT_OUT.get(asked, set())
