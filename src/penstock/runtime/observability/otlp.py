"""Requests of OpenTelemetry's exporters over OTLP/HTTP: session, deadline, and one warning for a series of failures.

The module needs the extra `otel`. The exporters run in threads of the SDK, so a receiver that does not answer delays
nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_HEADERS
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.util.re import parse_env_headers
from opentelemetry.util.types import AttributeValue

import penstock
from penstock.errors import ConfigError, UnavailableError

__all__ = ["CLOSE_S", "Exports", "OtlpOptions", "check_headers", "resource_of"]

CLOSE_S: Final = 3.0
"""Seconds after the begin of ``close`` after which no more requests are sent."""
_NOISY: Final = (
    # They log each failure and each dropped item; `Exports` reports a series of failures once.
    "opentelemetry.exporter.otlp",
    "opentelemetry.sdk._shared_internal",
    # They log each malformed `tracestate`, which clients send.
    "opentelemetry.trace.span",
    "opentelemetry.trace.propagation.tracecontext",
    # It logs the credentials of a malformed variable; `check_headers` reports it without them.
    "opentelemetry.util.re",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpOptions:
    """A receiver of OTLP over HTTP.

    ``endpoint``: its base URL; ``timeout_s``: longest duration of an export with its retries; ``ca``: authorities of
    its certificate.
    """

    endpoint: str
    timeout_s: float = 3.0
    ca: Path | None = None


def check_headers(option: str, signal: str) -> None:
    """Check the variables with headers of requests, and silence the loggers of OpenTelemetry.

    ``option`` is the section of the configuration, ``signal`` is ``traces``, ``metrics`` or ``logs``.

    Raises:
        ConfigError: a variable is malformed; without its value, which is a secret.
    """
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for name in (OTEL_EXPORTER_OTLP_HEADERS, f"OTEL_EXPORTER_OTLP_{signal.upper()}_HEADERS"):
        for number, pair in enumerate(os.environ.get(name, "").split(","), start=1):
            if not pair.strip():
                continue
            read = parse_env_headers(pair, liberal=True)
            if not read or any(not value.isprintable() for value in read.values()):
                raise ConfigError(
                    f"{option}: part {number} of {name} is no header",
                    option=option,
                    why="expected NAME=VALUE pairs with commas between them, and special characters as %XX",
                    hint=f"correct the variable: {name}='authorization=Bearer%20TOKEN'",
                )


def resource_of(attributes: Mapping[str, AttributeValue]) -> Resource:
    """Return the resource of this process: the service ``penstock`` (``OTEL_SERVICE_NAME``) with ``attributes``."""
    return Resource.create(
        {
            SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME") or "penstock",
            "service.version": penstock.__version__,
            **attributes,
        }
    )


class _Session(requests.Session):
    """The HTTP session of an exporter; ``problem`` is the reason why its last request failed."""

    problem = ""

    def request(self, *args: Any, **fields: Any) -> requests.Response:
        if isinstance(self.verify, str):  # otherwise the variable REQUESTS_CA_BUNDLE would replace it
            fields["verify"] = self.verify
        try:
            response = super().request(*args, **fields)
        except Exception as error:
            self.problem = _innermost(error)
            raise
        self.problem = "" if response.ok else f"the receiver answered {response.status_code} {response.reason}"
        return response


def _innermost(error: BaseException) -> str:
    """Return the message of the first cause: those of requests and urllib3 contain the names of their objects."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error) or type(error).__name__


class Exports:
    """The exports of one ``signal``: ``traces``, ``metrics`` or ``logs``. ``items`` names what is sent, in errors."""

    def __init__(self, options: OtlpOptions, signal: str, items: str, log: logging.Logger) -> None:
        self.failure: UnavailableError | None = None
        """The error of the last export; None after a success."""
        self._items = items
        self._log = log
        self._options = options
        self._session = _Session()
        self._stop_at: float | None = None
        base, path = options.endpoint.rstrip("/"), f"/v1/{signal}"
        self.endpoint = base if base.endswith(path) else base + path

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the SDK's exporter."""
        return {
            "endpoint": self.endpoint,
            "certificate_file": None if self._options.ca is None else str(self._options.ca),
            "timeout": self._options.timeout_s,
            "compression": Compression.Gzip,
            "session": self._session,
        }

    def stop_soon(self) -> None:
        """Send no more requests after :data:`CLOSE_S`."""
        self._stop_at = time.monotonic() + CLOSE_S

    def send(self, export: Callable[[], bool]) -> bool:
        """Call ``export``, which returns True after a success; report a series of failures once. Returns its result."""
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            return False
        if export():
            if self.failure is not None:
                self.failure = None
                self._log.info("%s are exported again", self._items, extra={"fields": {"endpoint": self.endpoint}})
            return True
        first = self.failure is None
        self.failure = UnavailableError(
            f"{self._items} cannot be sent to {self.endpoint}",
            applied=None,
            why=self._session.problem or f"the {self._items} could not be encoded",
            hint="check that a receiver of OTLP over HTTP listens there (port 4318 by default; 4317 is gRPC)",
        )
        if first:
            # Complete without fields: a pipeline's command shows the message only.
            self._log.warning(
                "%s cannot be sent to %s and are dropped (%s)", self._items, self.endpoint, self.failure.why
            )
        return False
