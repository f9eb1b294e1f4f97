"""Storage with the protocol of S3 for tests: moto in a process of its own, on loopback, which can fail on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.request import ProxyHandler, Request, build_opener

import pytest

BUCKET = "lake"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "penstock", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}
ANSWER_S = 60.0
_open = build_opener(ProxyHandler({})).open


class ObjectStorage(NamedTuple):
    """A bucket of the server at ``endpoint``. ``url`` is a path in it that only one test uses."""

    endpoint: str
    url: str

    def fail(self, kind: str, *, method: str = "PUT", path: str = "", count: int = 1, skip: int = 0) -> None:
        """Make ``count`` requests fail whose path contains ``path``, after ``skip`` of them.

        ``busy``: answer 503; ``cut``: end the connection; ``lost``: perform the request and end the connection;
        ``unconditional``: perform it without its conditions, as an old storage does; ``conflict``: answer 409, as AWS
        does if another request for the object is in progress; ``never``: refuse the condition, answer 412.
        """
        fault = {"kind": kind, "method": method, "path": path, "count": count, "skip": skip}
        self._post("/-/fault", json.dumps(fault))

    def repair(self) -> int:
        """End all failures; return the number of requests that failed."""
        return int(self._post("/-/repair", ""))

    def check_credentials(self, *, enabled: bool) -> None:
        """Refuse all requests, whose credentials are unknown, or accept all."""
        self._post("/moto-api/reset-auth", "0" if enabled else "1e12")

    def _post(self, path: str, body: str) -> str:
        headers = {"Content-Type": "text/plain"}
        request = Request(self.endpoint + path, body.encode(), headers)
        with _open(request, timeout=ANSWER_S) as response:
            return str(response.read().decode())


@pytest.fixture(scope="session")
def object_storage_endpoint() -> Iterator[str]:
    """Start the server; it ends when its input ends."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.object_storage"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            port = server.stdout.readline().strip()
            assert port, "the server ended; its error is above"
            endpoint = f"http://127.0.0.1:{port}"
            with _open(Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=ANSWER_S):
                pass
            yield endpoint
        finally:
            server.stdin.close()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


@pytest.fixture
def object_storage(object_storage_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStorage]:
    """A path in a bucket, for which the environment has endpoint and credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    # No request leaves this machine to look for credentials.
    settings = {"AWS_ENDPOINT_URL": object_storage_endpoint, "AWS_REGION": "us-east-1"}
    for name, value in (CREDENTIALS | settings | {"AWS_EC2_METADATA_DISABLED": "true"}).items():
        monkeypatch.setenv(name, value)
    found = ObjectStorage(object_storage_endpoint, f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}")
    yield found
    found.check_credentials(enabled=False)
    found.repair()


_ANSWERS = {
    "busy": ("503 Slow Down", "SlowDown"),
    "conflict": ("409 Conflict", "ConditionalRequestConflict"),
    "never": ("412 Precondition Failed", "PreconditionFailed"),
}
"""Status and code of the answer to a request that is not performed, by kind of failure."""


class _Faults:
    """Fails requests of the application ``moto``."""

    def __init__(self, moto: Callable[..., Any]) -> None:
        self._moto = moto
        self._faults: list[dict[str, Any]] = []
        self._failed = 0
        self._lock = threading.Lock()  # the server has a thread for each connection

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        path = environ["PATH_INFO"]
        if path.startswith("/-/"):
            return self._control(path, environ, start_response)
        kind = self._kind(environ["REQUEST_METHOD"], path)
        if kind in _ANSWERS:
            status, code = _ANSWERS[kind]
            body = f"<Error><Code>{code}</Code><Message>The test has chosen this.</Message></Error>".encode()
            start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        if kind == "unconditional":
            for name in ("HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"):
                environ.pop(name, None)
            return self._moto(environ, start_response)
        if kind is not None:
            if kind == "lost":
                list(self._moto(environ, lambda *_: None))
            environ["werkzeug.socket"].shutdown(2)
            return []
        return self._moto(environ, start_response)

    def _kind(self, method: str, path: str) -> str | None:
        with self._lock:
            for fault in self._faults:
                if fault["method"] == method and fault["path"] in path and fault["count"]:
                    if fault["skip"]:
                        fault["skip"] -= 1
                        continue
                    fault["count"] -= 1
                    self._failed += 1
                    return str(fault["kind"])
            return None

    def _control(self, path: str, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            if path == "/-/fault":
                self._faults.append(json.loads(body))
                found = b""
            else:
                found = str(self._failed).encode()
                self._faults, self._failed = [], 0
        start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(found)))])
        return [found]


def main() -> None:
    """Serve until the input ends, which it does with the process of the tests."""
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.disable(logging.ERROR)
    server = make_server("127.0.0.1", 0, _Faults(DomainDispatcherApplication(create_backend_app)), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
