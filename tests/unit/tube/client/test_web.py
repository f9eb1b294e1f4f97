"""Requests to the administration: rows back, refusals and strangers told apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import HTTPServer
from typing import ClassVar
from urllib.parse import parse_qsl

import pytest

from penstock.errors import ConfigError, RefusedError, UnavailableError
from penstock.tube.client.web import WebLogin, call
from tests.http_server import Handler, HttpThread


class Master(Handler):
    answer: ClassVar[bytes] = b""
    asked: ClassVar[list[tuple[str, dict[str, str]]]] = []

    def do_POST(self) -> None:
        form = self.rfile.read(int(self.headers["Content-Length"])).decode()
        Master.asked.append((self.path, dict(parse_qsl(form))))
        self.respond(200, Master.answer)


@pytest.fixture
def address() -> Iterator[str]:
    Master.asked.clear()
    with HttpThread(HTTPServer(("127.0.0.1", 0), Master)) as thread:
        yield thread.address


def test_rows_come_back(address: str) -> None:
    Master.answer = json.dumps({"result": True, "errCode": 0, "errMsg": "OK", "data": [{"a": 1}], "count": 1}).encode()
    assert call(f"http://{address}/", "m", {"topicName": "x y"}) == [{"a": 1}]
    assert Master.asked == [("/webapi.htm", {"method": "m", "topicName": "x y"})]


def test_the_token_goes_along_with_every_request(address: str) -> None:
    Master.answer = json.dumps({"result": True, "data": []}).encode()
    call(address, "m", {}, login=WebLogin("secret"))
    assert Master.asked == [("/webapi.htm", {"method": "m", "confModAuthToken": "secret"})]


REFUSED: list[dict[str, object]] = [
    {"result": False, "errCode": 400, "errMsg": "unknown method"},
    {"result": True, "errCode": 0, "errMsg": "OK", "data": [{"success": False, "errCode": 402, "errInfo": "exists"}]},
]


@pytest.mark.parametrize(("answer", "code"), [(REFUSED[0], 400), (REFUSED[1], 402)])
def test_a_refusal_carries_code_and_words(address: str, answer: dict[str, object], code: int) -> None:
    Master.answer = json.dumps(answer).encode()
    with pytest.raises(RefusedError) as caught:
        call(address, "m", {})
    assert caught.value.code == code
    assert caught.value.text in caught.value.what


def test_refusals_name_the_remedy(address: str) -> None:
    Master.answer = json.dumps({"result": False, "errMsg": "Unsupported method: 'm'; known: a, b, c"}).encode()
    with pytest.raises(RefusedError, match=f"{address} is not the administration of a TubeMQ master") as caught:
        call(address, "m", {})
    assert caught.value.hint == "set the HTTP address of a master: --http HOST:PORT"
    for words in ("", "Bad request from client, "):
        text = f"{words}illegal access, unauthorized request!"
        Master.answer = json.dumps({"result": False, "errMsg": text}).encode()
        with pytest.raises(RefusedError, match=r"no valid administration token.*\n.*--admin-token"):
            call(address, "m", {})
    Master.answer = json.dumps({"result": False, "errMsg": "tube: topic 'x' exists"}).encode()
    with pytest.raises(RefusedError, match=r"^the master refused the request: topic 'x' exists$"):
        call(address, "admin_add_new_topic_record", {})


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b"{}"])
def test_a_server_without_an_administration_raises_unavailable(address: str, answer: bytes) -> None:
    Master.answer = answer
    with pytest.raises(UnavailableError, match="the administration of a TubeMQ master is not reachable at") as caught:
        call(address, "m", {})
    assert caught.value.why == "the server at this address has no such administration (HTTP status 200)"


def test_an_unreachable_server_raises_unavailable() -> None:
    with pytest.raises(UnavailableError) as caught:
        call("127.0.0.1:1", "m", {})
    assert (caught.value.applied, caught.value.why) == (False, "nothing listens there (connection refused)")
    with pytest.raises(ConfigError, match=r"--http: got 'x'\n.*why: expected HOST:PORT"):
        call("x", "m", {})
