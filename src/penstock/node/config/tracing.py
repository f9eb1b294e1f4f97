"""Configuration of traces, metrics and logs over OTLP."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from penstock.node.config.client_files import check_client_files
from penstock.node.config.listeners import Section
from penstock.runtime.extras import needs_extra
from penstock.runtime.io.tls import TlsOptions

__all__ = ["TelemetrySection", "TracingSection", "needs_otel", "otlp_endpoint"]


def needs_otel(section: str) -> AbstractContextManager[None]:
    """Translate a failed import of the extra `otel`, which ``section`` needs, inside the block.

    Raises:
        ConfigError: a library of the extra is not installed.
    """
    return needs_extra("otel", f"{section}: a library is not installed", section)


def otlp_endpoint(value: str) -> str:
    """Return the base URL of a receiver of OTLP over HTTP; raises ValueError if ``value`` is none."""
    parts = urlsplit(value)
    # The port raises ValueError if it is none.
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0 or parts.query or parts.fragment:
        raise ValueError("expected a URL of a receiver of OTLP over HTTP, such as http://127.0.0.1:4318")
    if parts.username is not None:  # logs and errors show the URL
        raise ValueError("expected a URL without credentials: set the variable OTEL_EXPORTER_OTLP_HEADERS")
    return value


RequestTimeout = Annotated[
    float, Field(gt=0, le=10, description="maximum duration of a request in seconds, with its retries")
]
Authorities = Annotated[
    Path | None,
    Field(description="PEM file: authorities of the receiver's certificate; default: those of `certifi`"),
]


class TracingSection(Section):
    """Export spans of messages that rules copy and of requests to the state store, over OTLP/HTTP."""

    endpoint: Annotated[str, AfterValidator(otlp_endpoint)] = Field(
        description="base URL of the receiver, such as `http://127.0.0.1:4318`; spans are sent to its path `/v1/traces`"
    )
    sample_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the messages and requests without a valid `traceparent` that begin a trace. Those with "
        "one are recorded if the sender has set the flag `sampled`",
    )
    timeout_s: RequestTimeout = 3.0
    ca: Authorities = None

    def check_files(self) -> None:
        """Read the authorities. Raises ConfigError if the file cannot be used."""
        if self.ca is not None:
            check_client_files(TlsOptions(ca_file=self.ca), "tracing", prefix="")


class TelemetrySection(Section):
    """Export metrics and log lines over OTLP/HTTP. `tracing` exports spans."""

    endpoint: Annotated[str, AfterValidator(otlp_endpoint)] = Field(
        description="base URL of the receiver, such as `http://127.0.0.1:4318`; requests have the paths `/v1/metrics` "
        "and `/v1/logs`"
    )
    metrics: bool = Field(default=True, description="whether metrics are exported, with the names of `/metrics`")
    metrics_interval_s: float = Field(
        default=60.0, ge=1, le=3600, description="interval of the exports of metrics in seconds"
    )
    logs: bool = Field(default=True, description="whether log lines are exported, of the severities of `log_level`")
    timeout_s: RequestTimeout = 3.0
    ca: Authorities = None

    @model_validator(mode="after")
    def _exports_something(self) -> TelemetrySection:
        if not (self.metrics or self.logs):
            raise ValueError("`metrics` and `logs` are both off: remove the section")
        return self

    def check_files(self) -> None:
        """Read the authorities. Raises ConfigError if the file cannot be used."""
        if self.ca is not None:
            check_client_files(TlsOptions(ca_file=self.ca), "telemetry", prefix="")
