"""`penstock mqtt`: publish, subscribe and ask, on any MQTT 5 broker."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.cli.broker_options import BrokerAccess, reaches
from penstock.cli.options import command_group, given_bytes
from penstock.cli.output import bytes_fields, escape, note, print_json, print_raw, shown
from penstock.cli.record_reader import Lines, chunks
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.mqtt.client import MqttClient
    from penstock.mqtt.codec.packets import Publish
    from penstock.mqtt.codec.properties import Properties

__all__ = ["app"]

T = TypeVar("T")

app = command_group("Publish, subscribe and ask, on any MQTT 5 broker.")

Qos = Annotated[int, typer.Option("--qos", "-q", help="Quality of service.", min=0, max=2, metavar="N")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Payload = Annotated[
    str | None, typer.Argument(help="The payload; without it, it is read from --file or stdin.", metavar="PAYLOAD")
]
File = Annotated[
    Path | None, typer.Option(help="Take the payload from this file, byte for byte; -: from stdin.", metavar="PATH")
]
UserProperty = Annotated[
    list[str] | None,
    typer.Option("--property", "-p", help="User property; may repeat.", metavar="NAME=VALUE"),
]
ContentType = Annotated[str | None, typer.Option(help="Content type.", metavar="TEXT")]
Expiry = Annotated[int | None, typer.Option("--expiry-s", help="Message expiry in seconds.", min=0, metavar="S")]


@app.command(name="pub")
@reaches
def pub_command(
    topic: Annotated[str, typer.Argument(help="Topic name.", metavar="TOPIC")],
    payload: Payload = None,
    file: File = None,
    lines: Annotated[bool, typer.Option("--lines", help="Publish each line of standard input.")] = False,
    qos: Qos = 1,
    retain: Annotated[bool, typer.Option("--retain", "-r", help="Keep it as the topic's retained message.")] = False,
    user_property: UserProperty = None,
    content_type: ContentType = None,
    expiry_s: Expiry = None,
    response_topic: Annotated[str | None, typer.Option(help="Where an answer is expected.", metavar="TOPIC")] = None,
    correlation: Annotated[str | None, typer.Option(help="Correlation data.", metavar="TEXT")] = None,
    as_json: Json = False,
    *,
    access: BrokerAccess,
) -> None:
    """Publish PAYLOAD to TOPIC and wait for the acknowledgement (at QoS 1 and 2).

    Says so on standard error where nobody is subscribed. Exit status 1 when the broker refused it.
    """
    properties = _properties(user_property, content_type, expiry_s)
    properties.response_topic = response_topic
    properties.correlation_data = None if correlation is None else correlation.encode("utf-8", "surrogateescape")
    if lines and (payload is not None or file is not None):
        raise ConfigError("--lines reads standard input", option="--lines", do="leave PAYLOAD and --file out")
    payloads = _lines() if lines else _alone(given_bytes("mqtt pub", "PAYLOAD", payload, file))
    client = _client(access)

    async def publish() -> None:
        async with access.opened(client):
            async for data in payloads:
                code = await client.publish(topic, data, qos=qos, retain=retain, properties=properties.copy())
                if as_json:
                    print_json({"topic": topic, "bytes": len(data), "qos": qos, "reason_code": code})
                elif code == 0x10:
                    note(f"penstock: nobody is subscribed to '{escape(topic)}'")

    _run(publish())


@app.command(name="sub")
@reaches
def sub_command(
    filters: Annotated[list[str], typer.Argument(help="Topic filters; + and # are wildcards.", metavar="FILTER...")],
    qos: Qos = 1,
    count: Annotated[int | None, typer.Option(help="End after so many messages.", min=1, metavar="N")] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout-s",
            "--timeout",
            help="End after so many seconds; exit status 1 where --count was not met.",
            metavar="S",
        ),
    ] = None,
    no_retained: Annotated[bool, typer.Option("--no-retained", help="Only what is published from now on.")] = False,
    no_local: Annotated[bool, typer.Option("--no-local", help="Not what this client identifier publishes.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="The payloads alone, byte for byte.")] = False,
    session_expiry_s: Annotated[
        int, typer.Option(help="Keep the session so long after the end; needs --client-id.", min=0, metavar="S")
    ] = 0,
    as_json: Json = False,
    *,
    access: BrokerAccess,
) -> None:
    """Print each message that matches, until Ctrl-C.

    A line is topic, payload, and in brackets what else the message carries. A lost connection is opened again. With
    --session-expiry-s the broker keeps what comes while nobody listens, and the next call prints it.
    """
    if raw and as_json:
        raise ConfigError("mqtt sub: --raw and --json exclude each other", option="--raw", do="give one of the two")
    if session_expiry_s and not access.client_id:
        raise ConfigError(
            "mqtt sub: a session is kept under a client identifier",
            option="--session-expiry-s",
            do="give --client-id as well",
        )
    client = _client(access, session_expiry_s=session_expiry_s)
    _tell_of_outages(client)

    async def listen() -> int:
        from penstock.mqtt.codec.packets import Subscription

        wanted = [Subscription(f, qos, no_local, True, 2 if no_retained else 0) for f in filters]
        async with access.opened(client):
            await client.subscribe(wanted)
            note(f"subscribed to {', '.join(escape(f) for f in filters)}, Ctrl-C ends")
            seen = await _take(client, partial(_show, raw=raw, as_json=as_json), count, timeout_s)
            client.acknowledge_last()  # what was printed counts as received before the session is left
        return seen

    with contextlib.suppress(KeyboardInterrupt):
        seen = _run(listen())
        if count is not None and seen < count:
            note(f"penstock: {seen} of {count} messages came within {timeout_s:g} s")
            raise typer.Exit(1)


async def _take(client: MqttClient, show: Callable[[Publish], None], count: int | None, timeout_s: float | None) -> int:
    """Show messages as they come, ``count`` at most and for ``timeout_s`` at most; how many came."""
    seen = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            async for message in client.messages():
                show(message)
                seen += 1
                if seen == count:
                    break
    return seen


@app.command(name="request")
@reaches
def request_command(
    topic: Annotated[str, typer.Argument(help="Topic of whoever answers.", metavar="TOPIC")],
    payload: Payload = None,
    file: File = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", "--timeout", help="Wait so long for the response.", metavar="S")
    ] = 10.0,
    user_property: UserProperty = None,
    content_type: ContentType = None,
    as_json: Json = False,
    *,
    access: BrokerAccess,
) -> None:
    """Publish a request and write the payload of its response to standard output, byte for byte.

    Exit status 1 when nobody is subscribed, or no response comes in time.
    """
    data = given_bytes("mqtt request", "PAYLOAD", payload, file)
    properties = _properties(user_property, content_type, None)
    client = _client(access)

    async def ask() -> None:
        async with access.opened(client):
            response = await client.request(topic, data, timeout_s, properties=properties)
            _show(response, raw=not as_json, as_json=as_json)

    _run(ask())


def _client(access: BrokerAccess, *, session_expiry_s: int = 0) -> MqttClient:
    from penstock.mqtt.client import MqttClient

    return MqttClient(
        access.broker,
        client_id=access.client_id or "",
        clean_start=not session_expiry_s,
        session_expiry_s=session_expiry_s,
        **access.credentials(),
    )


def _properties(user: list[str] | None, content_type: str | None, expiry_s: int | None) -> Properties:
    from penstock.mqtt.codec.properties import Properties

    pairs = []
    for given in user or []:
        name, equals, value = given.partition("=")
        if not equals:
            raise ConfigError(f"--property: got {given!r}, expected NAME=VALUE", option="--property")
        pairs.append((name, value))
    return Properties(user_properties=pairs, content_type=content_type, message_expiry_interval=expiry_s)


async def _alone(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _lines() -> AsyncIterator[bytes]:
    """The lines of standard input, as they come in: the connection is kept meanwhile."""
    splitter = Lines()
    async for data in chunks(sys.stdin.buffer):
        for line in splitter.feed(data):
            yield line
    for line in splitter.end():
        yield line


def _show(message: Publish, *, raw: bool, as_json: bool) -> None:
    if raw:
        print_raw(message.payload)
    elif as_json:
        print_json(_row(message))
    else:
        extras = _extras(message)
        sys.stdout.write(f"{escape(message.topic)}  {shown(message.payload)}{f'  [{extras}]' if extras else ''}\n")
        sys.stdout.flush()


def _row(message: Publish) -> dict[str, object]:
    """Every field, also where it is absent: stable keys."""
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
    """What of a message is worth a word beside topic and payload."""
    found = ["retained"] if message.retain else []
    given = message.optional_properties
    if given is not None:
        if given.content_type is not None:
            found.append(f"content type {given.content_type}")
        if given.response_topic is not None:
            found.append(f"answer to {given.response_topic}")
        if given.correlation_data is not None:
            found.append(f"correlation {shown(given.correlation_data)}")
        if given.message_expiry_interval is not None:
            found.append(f"expires in {given.message_expiry_interval} s")
        found += [f"{name}={value}" for name, value in given.user_properties]
    return escape(", ".join(found))


def _run(work: Coroutine[Any, Any, T]) -> T:
    from penstock.runtime.io.loop import run

    return run(work)


def _tell_of_outages(client: MqttClient) -> None:
    """Say on standard error when the connection is lost, and when it is back."""
    lost = False

    def disconnected(error: PenstockError | None) -> None:
        nonlocal lost
        if error is not None:
            lost = True
            note(f"penstock: {error.what}; trying again")

    def connected(_session_present: bool) -> None:
        nonlocal lost
        if lost:
            lost = False
            note("penstock: connected again")

    client.on_disconnected(disconnected)
    client.on_connected(connected)
