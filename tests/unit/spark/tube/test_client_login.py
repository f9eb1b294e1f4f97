"""The administration by HTTP is asked as the user of the options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.io.tls import Login
from penstock.spark.tube.options import ConnectionOptions
from penstock.spark.tube.tube_client import ServerAccess
from penstock.tube.client import web


def test_the_names_of_all_topics_are_asked_for_as_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret\n")
    published: list[web.WebLogin] = []

    def call(*_: object, login: web.WebLogin, **__: object) -> list[dict[str, Any]]:
        published.append(login)
        return [{"topicName": "water"}, {"topicName": "__offset_history__"}]

    monkeypatch.setattr(web, "call", call)
    assert ServerAccess(ConnectionOptions("127.0.0.1:1", Login("ann", tmp_path / "password")), 1.0).topics() == [
        "water"
    ]
    assert ServerAccess(ConnectionOptions("127.0.0.1:1"), 1.0).topics() == ["water"]
    assert [(login.username, login.password) for login in published] == [("ann", "secret"), (None, "")]
