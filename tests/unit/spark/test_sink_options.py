from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.spark.sink_options import SinkOptions

BASE = {"tubemq.master": "127.0.0.1:8715"}


def test_options_as_spark_hands_them_over() -> None:
    assert SinkOptions.parse(BASE) == SinkOptions("127.0.0.1:8715", None, 60.0)
    given = {"TOPIC": "a", "tubemq.timeoutms": "500", "checkpointLocation": "/x", "queryname": "q"}
    assert SinkOptions.parse(BASE | given) == SinkOptions("127.0.0.1:8715", "a", 0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tubemq.master": "nowhere"}, "'nowhere' is not HOST:PORT"),
        ({"topic": " "}, "topic is empty"),
        ({"tubemq.timeoutMs": "0"}, "'0' is not a number above 0"),
        ({"includeHeaders": "true"}, r"not supported by the tubemq sink[\s\S]*leave it out"),
        ({"topics": "a"}, r"'topics' is not known to the tubemq sink[\s\S]*did you mean topic\?"),
    ],
)
def test_what_cannot_be_used(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SinkOptions.parse(BASE | given)
