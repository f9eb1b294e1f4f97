from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.spark.tube.options import DeliveryGuarantee, SinkOptions, Transaction
from penstock.statestore.hlc import Hlc

BASE = {"tubemq.master": "127.0.0.1:8715"}


def test_options_as_spark_hands_them_over() -> None:
    assert SinkOptions.parse(BASE) == SinkOptions("127.0.0.1:8715", None, 60.0)
    given = {"TOPIC": "a", "tubemq.timeoutms": "500", "checkpointLocation": "/x", "queryname": "q"}
    assert SinkOptions.parse(BASE | given) == SinkOptions("127.0.0.1:8715", "a", 0.5)
    assert SinkOptions.parse(BASE | {"partition": "0"}).partition == 0
    assert SinkOptions.parse(BASE | {"includeheaders": "true"}) == SinkOptions.parse(BASE)


def test_delivery_guarantee_transaction_and_fencing_token_are_parsed() -> None:
    found = SinkOptions.parse(
        BASE
        | {"DELIVERYGUARANTEE": "Exactly-Once", "txnappid": "q/out", "txnVersion": "17", "fencingToken": "5:1:node"}
    )
    assert found.delivery is DeliveryGuarantee.EXACTLY_ONCE
    assert found.transaction == Transaction("q/out", 17)
    assert found.token == Hlc(5, 1, "node")
    assert SinkOptions.parse(BASE | {"deliveryGuarantee": "at-least-once"}).delivery is DeliveryGuarantee.AT_LEAST_ONCE


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tubemq.master": "nowhere"}, "'nowhere' is not HOST:PORT"),
        ({"topic": " "}, "topic is empty"),
        ({"partition": "-1"}, "partition '-1' is not a number"),
        ({"partition": ""}, "partition '' is not a number"),
        ({"partition": "2147483648"}, "is not a number"),
        ({"tubemq.timeoutMs": "0"}, "'0' is not a number above 0"),
        ({"deliveryGuarantee": "once"}, r"deliveryGuarantee 'once' is not a delivery guarantee[\s\S]*at-least-once"),
        ({"txnAppId": "a"}, r"txnAppId 'a' and txnVersion None do not identify a write[\s\S]*set both"),
        ({"txnVersion": "1"}, "txnAppId None and txnVersion '1'"),
        ({"txnAppId": "a" * 513, "txnVersion": "1"}, "1 to 512 characters"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "txnVersion '-1' is not a number"),
        ({"txnAppId": "a", "txnVersion": "1", "deliveryGuarantee": "at-least-once"}, "txnAppId cannot be combined"),
        ({"fencingToken": "soon"}, "fencingToken 'soon' is not a version"),
        ({"includeHeaders": "yes"}, "includeHeaders 'yes' is neither true nor false"),
        ({"kafka.bootstrap.servers": "h:1"}, r"not supported by the tubemq sink[\s\S]*set tubemq.master"),
        ({"kafka.acks": "all"}, r"kafka.acks is not supported by the tubemq sink[\s\S]*remove it"),
        ({"subscribe": "a"}, r"subscribe is not supported by the tubemq sink[\s\S]*set topic"),
        ({"topics": "a"}, r"the tubemq sink has no option 'topics'[\s\S]*did you mean topic\?"),
    ],
)
def test_invalid_options_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SinkOptions.parse(BASE | given)
