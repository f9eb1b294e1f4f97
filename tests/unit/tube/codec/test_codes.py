"""Hints for errors of TubeMQ servers, and their kinds in words."""

from __future__ import annotations

import pytest

from penstock.errors import RefusedError
from penstock.tube.codec.codes import ErrCode, remedy
from penstock.tube.codec.envelope import Response, payload_of
from penstock.tube.codec.exceptions import EXCEPTION, STOPPING, kind_of
from penstock.tube.codec.methods import MethodId


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (
            "user ann may not produce to topic events",
            "grant Produce on events to ann in the policy file of the server,",
        ),
        ("an anonymous client may not consume topic events", "grant Consume on events to anonymous clients in"),
        ("user ann may not consume topics a, b as group lake", "grant Consume on a, b for group lake to ann in"),
    ],
)
def test_a_denied_request_has_the_permission_as_its_hint(text: str, hint: str) -> None:
    found = remedy(ErrCode.FORBIDDEN, text)
    assert found is not None
    assert found.startswith(hint)
    assert found.endswith("then SIGHUP")


def test_errors_have_no_names_of_java_classes() -> None:
    assert (kind_of(STOPPING), kind_of(EXCEPTION)) == ("service stopping", "it gives no reason")
    for method in (MethodId.PRODUCER_REGISTER, MethodId.SEND_MESSAGE):
        response = Response(1, status=1, exception=EXCEPTION, text="producerRegisterP2M is answered by a master")
        with pytest.raises(RefusedError) as caught:
            payload_of(response, method, "127.0.0.1:8123")
        assert "java" not in str(caught.value)
        assert caught.value.why == "producerRegisterP2M is answered by a master"
