"""`penstock mqtt`: publish, subscribe and send requests with any MQTT 5 broker."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.cli.options import BrokerOptions, Commands, Json, connects_to_broker, duration_option, input_bytes
from penstock.cli.output import bytes_fields, escape, note, print_json, print_raw, shown, shown_payload
from penstock.cli.record_reader import LineSplitter, chunks
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.mqtt.client import MqttClient
    from penstock.mqtt.codec.packets import Publish
    from penstock.mqtt.codec.properties import Properties

__all__ = ["app"]

T = TypeVar("T")

app = Commands("Publish, subscribe and send requests with any MQTT 5 broker.")

Qos = Annotated[int, typer.Option("--qos", "-q", help="Quality of service.", min=0, max=2, metavar="N")]
Payload = Annotated[str | None, typer.Argument(help="Payload. Default: --file or standard input.", metavar="PAYLOAD")]
File = Annotated[Path | None, typer.Option(help="Read the payload from a file; - for standard input.", metavar="FILE")]
UserProperty = Annotated[
    list[str] | None,
    typer.Option("--property", "-p", help="User property; repeatable.", metavar="NAME=VALUE"),
]
ContentType = Annotated[str | None, typer.Option(help="Content type.", metavar="TEXT")]
Expiry = Annotated[float | None, duration_option("--expiry", text="Message expiry interval, in whole seconds.")]


@app.add("penstock mqtt pub line/3/speed 42", "penstock mqtt pub line/3/speed --lines < speeds.txt", name="pub")
@connects_to_broker
def pub_command(
    topic: Annotated[str, typer.Argument(help="Topic name.", metavar="TOPIC")],
    payload: Payload = None,
    file: File = None,
    lines: Annotated[bool, typer.Option("--lines", help="Publish each line of standard input as a message.")] = False,
    qos: Qos = 1,
    retain: Annotated[
        bool, typer.Option("--retain", "-r", help="Publish it as the retained message of the topic.")
    ] = False,
    user_property: UserProperty = None,
    content_type: ContentType = None,
    expiry: Expiry = None,
    response_topic: Annotated[str | None, typer.Option(help="Topic for a response.", metavar="TOPIC")] = None,
    correlation: Annotated[str | None, typer.Option(help="Correlation data.", metavar="TEXT")] = None,
    as_json: Json = False,
    *,
    access: BrokerOptions,
) -> None:
    """Publish PAYLOAD to TOPIC and wait for the acknowledgement (at QoS 1 and 2).

    Exit status 1 if the broker refuses it. If there is no subscriber, a note is printed to standard error.
    """
    properties = _properties(user_property, content_type, expiry)
    properties.response_topic = response_topic
    properties.correlation_data = None if correlation is None else correlation.encode("utf-8", "surrogateescape")
    if lines and (payload is not None or file is not None):
        raise ConfigError("--lines reads standard input", option="--lines", hint="omit PAYLOAD and --file")
    payloads = _lines() if lines else _alone(input_bytes("mqtt pub", "PAYLOAD", payload, file))
    client = _client(access)

    async def publish() -> None:
        async with access.opened(client):
            async for data in payloads:
                code = await client.publish(topic, data, qos=qos, retain=retain, properties=properties.copy())
                if as_json:
                    print_json({"topic": topic, "bytes": len(data), "qos": qos, "reason_code": code})
                elif code == 0x10:
                    note(f"note: the broker accepted the message; no client is subscribed to '{escape(topic)}'")

    _run(publish())


@app.add(
    "penstock mqtt sub 'line/#'", "penstock mqtt sub alarms --client-id desk --session-expiry 1h --json", name="sub"
)
@connects_to_broker
def sub_command(
    filters: Annotated[list[str], typer.Argument(help="Topic filters; + and # are wildcards.", metavar="FILTER...")],
    qos: Qos = 1,
    count: Annotated[
        int | None, typer.Option("--count", "-c", help="Exit after N messages.", min=1, metavar="N")
    ] = None,
    timeout: Annotated[
        float | None, duration_option(text="Exit after this time; with status 1 if --count was not reached.")
    ] = None,
    no_retained: Annotated[bool, typer.Option("--no-retained", help="Do not receive retained messages.")] = False,
    no_local: Annotated[
        bool, typer.Option("--no-local", help="Do not receive messages of this client identifier.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Print the payloads only, unchanged.")] = False,
    session_expiry: Annotated[
        float, duration_option(text="Keep the session this long after the end; needs --client-id.")
    ] = 0.0,
    as_json: Json = False,
    *,
    access: BrokerOptions,
) -> None:
    """Print each message that matches, until interrupted (Ctrl-C).

    A line has the topic, the payload, and in brackets other properties of the message. A lost connection is restored.
    With --session-expiry the broker keeps messages while the client is disconnected, and the next call prints them.
    """
    if raw and as_json:
        raise ConfigError("mqtt sub: --raw and --json exclude each other", option="--raw", hint="use one of them")
    if session_expiry and not access.client_id:
        raise ConfigError(
            "mqtt sub: --session-expiry needs a client identifier",
            option="--session-expiry",
            hint="set --client-id as well",
        )
    client = _client(access, session_expiry_s=math.ceil(session_expiry))
    _report_outages(client)

    async def listen() -> int:
        from penstock.mqtt.codec.packets import Subscription

        wanted = [Subscription(f, qos, no_local, True, 2 if no_retained else 0) for f in filters]
        async with access.opened(client):
            await client.subscribe(wanted)
            note(f"subscribed to {', '.join(escape(f) for f in filters)}, interrupt with Ctrl-C")
            seen = await _receive(client, partial(_show, raw=raw, as_json=as_json), count, timeout)
            client.acknowledge_last()  # acknowledge printed messages before the session ends
        return seen

    with contextlib.suppress(KeyboardInterrupt):
        seen = _run(listen())
        if count is not None and seen < count:
            note(f"penstock: {seen} of {count} messages within {timeout:g} s")
            raise typer.Exit(1)


async def _receive(
    client: MqttClient, show: Callable[[Publish], None], count: int | None, timeout_s: float | None
) -> int:
    """Show at most ``count`` messages within ``timeout_s``; returns the number of messages."""
    seen = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            async for message in client.messages():
                show(message)
                seen += 1
                if seen == count:
                    break
    return seen


@app.add("penstock mqtt request line/3/command start --timeout 5s", name="request")
@connects_to_broker
def request_command(
    topic: Annotated[str, typer.Argument(help="Topic of the responder.", metavar="TOPIC")],
    payload: Payload = None,
    file: File = None,
    timeout: Annotated[float, duration_option(text="Timeout of the response.", default="10s")] = 10.0,
    user_property: UserProperty = None,
    content_type: ContentType = None,
    as_json: Json = False,
    *,
    access: BrokerOptions,
) -> None:
    """Publish a request and write the payload of the response to standard output, unchanged.

    Exit status 1 if there is no subscriber, or no response in time.
    """
    data = input_bytes("mqtt request", "PAYLOAD", payload, file)
    properties = _properties(user_property, content_type, None)
    client = _client(access)

    async def ask() -> None:
        async with access.opened(client):
            response = await client.request(topic, data, timeout, properties=properties)
            _show(response, raw=not as_json, as_json=as_json)

    _run(ask())


def _client(access: BrokerOptions, *, session_expiry_s: int = 0) -> MqttClient:
    from penstock.mqtt.client import MqttClient

    return MqttClient(
        access.broker,
        client_id=access.client_id or "",
        clean_start=not session_expiry_s,
        session_expiry_s=session_expiry_s,
        **access.credentials(),
    )


def _properties(user: list[str] | None, content_type: str | None, expiry: float | None) -> Properties:
    from penstock.mqtt.codec.properties import Properties

    pairs = []
    for given in user or []:
        name, equals, value = given.partition("=")
        if not equals:
            raise ConfigError(f"--property: got {given!r}, expected NAME=VALUE", option="--property")
        pairs.append((name, value))
    return Properties(
        user_properties=pairs,
        content_type=content_type,
        message_expiry_interval=None if expiry is None else math.ceil(expiry),  # 0: expired
    )


async def _alone(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _lines() -> AsyncIterator[bytes]:
    """Yield the lines of standard input as they are read, while the connection remains open."""
    splitter = LineSplitter()
    async for data in chunks(sys.stdin.buffer):
        for line in splitter.feed(data):
            yield line
    for line in splitter.finish():
        yield line


def _show(message: Publish, *, raw: bool, as_json: bool) -> None:
    if raw:
        print_raw(message.payload)
    elif as_json:
        print_json(_row(message))
    else:
        extras = _extras(message)
        payload = shown_payload(message.payload, message.properties.content_type)
        sys.stdout.write(f"{escape(message.topic)}  {payload}{f'  [{extras}]' if extras else ''}\n")
        sys.stdout.flush()


def _row(message: Publish) -> dict[str, object]:
    """Return all fields, including absent ones, so that the keys are stable."""
    properties = message.properties
    return {
        "topic": message.topic,
        **bytes_fields("payload", message.payload),
        "qos": message.qos,
        "retain": message.retain,
        "content_type": properties.content_type,
        "response_topic": properties.response_topic,
        **bytes_fields("correlation_data", properties.correlation_data),
        "message_expiry_s": properties.message_expiry_interval,
        "properties": [list(pair) for pair in properties.user_properties],
    }


def _extras(message: Publish) -> str:
    """Format the properties of a message."""
    found = ["retained"] if message.retain else []
    given = message.optional_properties
    if given is not None:
        if given.content_type is not None:
            found.append(f"content type {given.content_type}")
        if given.response_topic is not None:
            found.append(f"response topic {given.response_topic}")
        if given.correlation_data is not None:
            found.append(f"correlation {shown(given.correlation_data)}")
        if given.message_expiry_interval is not None:
            found.append(f"expires in {given.message_expiry_interval} s")
        found += [f"{name}={value}" for name, value in given.user_properties]
    return escape(", ".join(found))


def _run(work: Coroutine[Any, Any, T]) -> T:
    from penstock.runtime.io.loop import run

    return run(work)


def _report_outages(client: MqttClient) -> None:
    """Report lost and restored connections on standard error."""
    lost = False

    def disconnected(error: PenstockError | None) -> None:
        nonlocal lost
        if error is not None:
            lost = True
            note(f"penstock: {error.what}; reconnecting")

    def connected(_session_present: bool) -> None:
        nonlocal lost
        if lost:
            lost = False
            note("penstock: reconnected")

    client.on_disconnected(disconnected)
    client.on_connected(connected)
