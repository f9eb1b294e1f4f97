"""The HTTP API of the console below ``/api/v1``: snapshots as JSON, for the command line and the web console.

Queries are GET and change nothing; a change is POST or DELETE, with ``dry_run`` for a preview. Required permissions:

* overview, health, history, topics, groups, rules: as queries of the administration, see :class:`HttpAccess`;
* clients, subscriptions, retained messages, keys, pipelines and events have names and addresses that clients chose:
  they need a viewer, see :class:`Role`;
* values of keys and records need a viewer who may read them by the policies, dead letters and changes an operator,
  backups and the audit trail an administrator. Requests for values and records have an entry in the audit trail, like
  each change; further pages of a list of records, and reads of a sample, have one per minute.

A list is a page: ``rows``, the cursor ``next`` (null on the last page), ``total``, and ``matched``, the number of rows
that pass the filter. Truncated lists and values are marked as such. An error is an object ``error`` with code, what,
why and hint.
"""

from __future__ import annotations

import asyncio
import base64
import csv
import io
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from starlette.convertors import IntegerConvertor, StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.console.console import Console
from penstock.console.pages import DEFAULT_LIMIT, MAX_LIMIT, Page, PageQuery
from penstock.console.records import RecordQuery
from penstock.console.snapshots import Key, RecordPage, as_json
from penstock.console.statestore import pattern_of
from penstock.errors import LocalProtocolError, PenstockError, RefusedError, StorageError, UnavailableError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.server import MqttServer
from penstock.node.api_access import (
    API,
    HEADERS,
    ApiAccess,
    ApiFailure,
    backup_route,
    body_of,
    number_of,
    respond_to,
)
from penstock.node.backup import Backups
from penstock.node.console_clients import ChangedMeanwhileError, ConsoleClients, LiveSubscription, message_snapshot
from penstock.node.http import Identify
from penstock.node.pipeline_commands import CommandResult, JobKind, PipelineCommands
from penstock.runtime.observability.audit import AuditTrail, read_audit
from penstock.runtime.observability.log_levels import check_level, levels, set_level
from penstock.runtime.observability.logs import LogLevel
from penstock.security.policy import Permissions
from penstock.statestore.hlc import Hlc, parse
from penstock.tube.admin.request import Caller, Role
from penstock.tube.record_filter import RecordFilter

__all__ = ["api_routes"]

_MAX_PAYLOAD: Final = 8 << 20
"""Limit of a corrected payload in bytes; no topic of TubeMQ accepts a larger one."""
MAX_SAMPLE: Final = 100
"""Limit of the rows of a step in a sample, which the node keeps until the next one."""
_CHANGES: Final = ("redrive", "correct", "resolve", "discard", "reopen", "purge")
"""Commands of `penstock pipeline dead-letter` that change letters."""

_FORMATS: Final = {"csv": "text/csv; charset=utf-8", "ndjson": "application/x-ndjson"}
_STARTS: Final = ("newest", "earliest", "end", "offset", "time")
READ_ENTRY_S: Final = 60.0
"""Time in which further pages of a topic's records have no entry of their own in the audit trail."""
_INHERITED: Final = "inherit"
"""Level of a part without one of its own: that of the part above it."""
_STARTING: Final = "this part has not started yet"


class _NameConvertor(StringConvertor):
    """A name that clients chose: unlike ``path``, it may have line breaks."""

    regex = r"[\s\S]*"


class _NumberConvertor(IntegerConvertor):
    """A number of at most 64 bits: ``int`` fails for very long ones, before the caller is known."""

    regex = "[0-9]{1,19}"


register_url_convertor("text", _NameConvertor())
register_url_convertor("number", _NumberConvertor())

T = TypeVar("T")
Read = Callable[[Request, Caller], Awaitable[object]]


class _Api:
    def __init__(
        self,
        console: Console,
        server: MqttServer,
        access: ApiAccess,
        trail: AuditTrail,
        commands: PipelineCommands,
        permissions: Callable[[str], Permissions | None],
        clients: ConsoleClients,
        reload: Callable[[], dict[str, object]] | None,
    ) -> None:
        self._console = console
        self._server = server
        self._access = access
        self._trail = trail
        self._commands = commands
        self._permissions = permissions
        self._clients = clients
        self._reload = reload
        self._reads: dict[tuple[str, ...], float] = {}
        """When the last entry about a reader of a topic, or of the rows of a sample, was written."""

    def route(self, path: str, read: Read, needs: Role = Role.NONE, method: str = "GET") -> Route:
        async def respond(request: Request) -> Response:
            caller = await self._access.caller(request, needs)
            export = request.query_params.get("format") if method == "GET" else None
            if export is not None:
                request = _with(request, limit=str(MAX_LIMIT))
            found = await read(request, caller)
            if export is not None and not isinstance(found, Response):  # a stream would not be closed
                return _export(export, found, lambda after: read(_with(request, after=after), caller))
            return _response(request, found)

        async def respond_or_refuse(request: Request) -> Response:
            return await respond_to(request, respond)

        return Route(API + path, respond_or_refuse, methods=[method])

    def _granted(self, caller: Caller) -> Permissions | None:
        """Return the permissions that limit the contents that a caller may read; None: all."""
        return None if caller.administers else self._permissions(caller.user)

    async def session(self, _request: Request, caller: Caller) -> object:
        return {"user": caller.user, "role": caller.role.name.lower(), "credential": caller.credential}

    async def audit(self, request: Request, _caller: Caller) -> object:
        limit, text = _limit(request), request.query_params.get("q", "").casefold()
        before = number_of(request, "after", 1 << 53)  # entries from this one on were on earlier pages

        def read() -> Page[dict[str, Any]]:
            total = matched = older = 0
            newest: deque[tuple[int, dict[str, Any]]] = deque(maxlen=limit)
            for row in read_audit(self._trail.directory):
                if not text or text in json.dumps(row, ensure_ascii=False).casefold():
                    matched += 1
                    if total < before:
                        older += 1
                        newest.append((total, row))
                total += 1
            more = str(newest[0][0]) if older > len(newest) else None
            rows = tuple({name: row.get(name) for name in _AUDIT} for _, row in reversed(newest))
            return Page(rows, more, total, matched)

        return await asyncio.to_thread(read)

    # Overview

    async def overview(self, _request: Request, _caller: Caller) -> object:
        return await self._console.overview()

    async def health(self, _request: Request, _caller: Caller) -> object:
        return self._console.health()

    async def cluster(self, _request: Request, _caller: Caller) -> object:
        hint = "add the section `cluster` to its configuration"
        views = _known(self._console.cluster, "this node is not in a cluster", hint)
        try:
            return await views.snapshot()
        except PenstockError as error:
            # Also a refusal of etcd, or a password file of its user: the caller's credentials are not the cause.
            raise ApiFailure.of(error, 503, "etcd_unavailable") from None

    async def history(self, request: Request, _caller: Caller) -> object:
        times, series = self._console.history(number_of(request, "since", 0))
        return {"at": times, "series": series}

    async def events(self, request: Request, _caller: Caller) -> object:
        least = request.query_params.get("level", "info")
        if least not in {"info", "warning", "error"}:
            raise LocalProtocolError(f"level={least!r}", hint="use info, warning or error")
        ring = self._console.events
        return {"rows": ring.since(number_of(request, "since", 0), _limit(request), least=least), "number": ring.number}

    async def rules(self, _request: Request, _caller: Caller) -> object:
        rows = self._console.rules()
        return {"rows": rows, "next": None, "total": len(rows), "matched": len(rows)}

    # MQTT

    async def clients(self, request: Request, _caller: Caller) -> object:
        return await _available(self._console.mqtt).clients(_query(request), request.query_params.get("state", ""))

    async def client(self, request: Request, _caller: Caller) -> object:
        name = request.path_params["name"]
        return _known(_available(self._console.mqtt).client(name), f"client {name!r} has no session")

    async def disconnect(self, request: Request, caller: Caller) -> object:
        name = request.path_params["name"]
        found = _known(_available(self._console.mqtt).client(name), f"client {name!r} has no session").client
        dry_run = _flag(request, "dry_run")
        if found.connected and not dry_run:
            await self._access.record("disconnect_client", caller, {"client_id": name})
            self._server.broker.disconnect(
                name, ReasonCode.ADMINISTRATIVE_ACTION, self._server.now(), "disconnected by an administrator"
            )
            self._server.broker.wake()
        return {"client_id": name, "disconnected": found.connected, "dry_run": dry_run, "client": found}

    async def log_levels(self, _request: Request, _caller: Caller) -> object:
        return {"levels": levels()}

    async def set_log_level(self, request: Request, caller: Caller) -> object:
        part, text = request.path_params["part"], request.query_params.get("level", "")
        if text != _INHERITED and text not in set(LogLevel):
            raise LocalProtocolError(f"level={text[:80]!r}", hint=f"use one of {', '.join(LogLevel)}, {_INHERITED}")
        wanted = None if text == _INHERITED else LogLevel(text)
        check_level(part, wanted)
        await self._access.record("set_log_level", caller, {"part": part, "level": text})
        set_level(part, wanted)
        return {"levels": levels()}

    async def reload(self, _request: Request, caller: Caller) -> object:
        reload = _available(self._reload)
        try:
            found = reload()
        except PenstockError as error:
            await self._access.record("reload", caller, {}, error)
            raise ApiFailure(409, "reload_failed", f"nothing changed: {error.what}", error.hint, error.why) from None
        await self._access.record("reload", caller, {})
        return found

    async def subscriptions(self, request: Request, _caller: Caller) -> object:
        return await _available(self._console.mqtt).subscriptions(_query(request))

    async def retained(self, request: Request, _caller: Caller) -> object:
        return await _available(self._console.mqtt).retained(_query(request), request.query_params.get("filter", "#"))

    async def retained_message(self, request: Request, caller: Caller) -> object:
        topic = request.path_params["name"]
        if (granted := self._granted(caller)) is not None and not granted.may_receive(topic):
            raise ApiFailure(403, "forbidden", f"user {caller.user!r} may not receive topic {topic!r}", _POLICY)
        _available(self._console.mqtt)
        found = _known(self._server.broker.retained.get(topic), f"topic {topic!r} has no retained message")
        await self._access.record("read_retained", caller, {"topic": topic})
        at = time.time() * 1000 - (self._server.now() - found.accepted_at)
        publish = Publish(topic, found.payload, int(found.qos), retain=True, properties=found.properties)
        return message_snapshot(publish, round(at), schemas=self._clients.schemas)

    async def messages(self, request: Request, caller: Caller) -> object:
        _available(self._console.mqtt)
        topic_filter, text = request.query_params.get("filter", ""), request.query_params.get("q", "")
        subscription = await _carried_out(
            self._clients.subscribe(_acting(caller), topic_filter, text, reader=caller.user)
        )
        await self._access.record("subscribe", caller, {"filter": topic_filter, "q": text})
        return _LinesResponse(subscription)

    async def topic_tree(self, request: Request, caller: Caller) -> object:
        _available(self._console.mqtt)
        topic_filter = request.query_params.get("filter", "#")
        subscription = await _carried_out(
            self._clients.subscribe_topics(_acting(caller), topic_filter, reader=caller.user)
        )
        await self._access.record("subscribe", caller, {"filter": topic_filter, "topics": True})
        return _LinesResponse(subscription)

    async def publish(self, request: Request, caller: Caller) -> object:
        _available(self._console.mqtt)
        params = request.query_params
        topic, qos, retain = params.get("topic", ""), number_of(request, "qos", 1, 0, 2), _flag(request, "retain")
        payload = await body_of(request, _MAX_PAYLOAD, "the payload")
        properties = _properties(request)
        code = await _carried_out(
            self._clients.publish(_acting(caller), topic, payload, qos=qos, retain=retain, properties=properties)
        )
        chosen = {"topic": topic, "qos": qos, "retain": retain, "bytes": len(payload)}
        await self._access.record("publish", caller, chosen)
        return {**chosen, "reason_code": code}

    # State store

    async def key_versions(self, request: Request, caller: Caller) -> object:
        _available(self._console.statestore)
        name, key = _key_of(request)
        rows, ends = await _carried_out(self._clients.versions(_acting(caller), key))
        if not rows:
            raise ApiFailure(404, "not_found", f"key {name!r} does not exist")
        await self._access.record("read_values", caller, {"key": name, "versions": len(rows)})
        return {"rows": rows, "ends": ends}

    async def key_changes(self, request: Request, caller: Caller) -> object:
        views = _available(self._console.statestore)
        asked = {name: request.query_params[name] for name in ("key", "prefix") if request.query_params.get(name)}
        if len(asked) != 1:
            raise LocalProtocolError("key-changes needs a key or a prefix", hint="add ?key=KEY or ?prefix=PREFIX")
        ((kind, name),) = asked.items()
        name, key = _decoded_key(request, name)
        watching = self._clients.watch(_acting(caller), key, views, prefix=kind == "prefix", reader=caller.user)
        observation = await _carried_out(watching)
        await self._access.record("watch_keys", caller, {kind: name})
        return _LinesResponse(observation)

    async def set_key(self, request: Request, caller: Caller) -> object:
        _available(self._console.statestore)
        (name, key), params = _key_of(request), request.query_params
        ttl_ms = number_of(request, "ttl_ms", 0) or None
        value = await body_of(request, _MAX_PAYLOAD, "the value")
        change = self._clients.set_key(
            _acting(caller), key, value,
            version=params.get("version"), ttl_ms=ttl_ms, fencing_token=_token(request),
        )  # fmt: skip
        await _carried_out(change)
        await self._access.record(
            "set_key", caller, {"key": name, "version": params.get("version"), "bytes": len(value)}
        )
        return {"key": name, "bytes": len(value)}

    async def delete_key(self, request: Request, caller: Caller) -> object:
        _available(self._console.statestore)
        (name, key), version = _key_of(request), request.query_params.get("version", "")
        await _carried_out(
            self._clients.delete_key(_acting(caller), key, version=version, fencing_token=_token(request))
        )
        await self._access.record("delete_key", caller, {"key": name, "version": version})
        return {"key": name, "deleted": True}

    async def keys(self, request: Request, caller: Caller) -> object:
        views = _available(self._console.statestore)
        query = _query(request)
        prefix, values = request.query_params.get("prefix", ""), _flag(request, "values")
        page = await views.keys(query, pattern_of(prefix, query.text), values=values)
        if values:
            await self._access.record(
                "read_values", caller, {"prefix": prefix, "q": query.text, "keys": len(page.rows)}
            )
            if (granted := self._granted(caller)) is not None:
                page = replace(page, rows=tuple(_readable(row, granted) for row in page.rows))
        return page

    async def key(self, request: Request, caller: Caller) -> object:
        name, key = _key_of(request)
        if (granted := self._granted(caller)) is not None and not granted.may_read(key):
            raise ApiFailure(403, "forbidden", f"user {caller.user!r} may not read key {name!r}", _POLICY)
        found = _known(_available(self._console.statestore).key(key), f"key {name!r} does not exist")
        await self._access.record("read_values", caller, {"key": name})
        return found

    # TubeMQ

    async def topics(self, request: Request, _caller: Caller) -> object:
        return await _available(self._console.tube).topics(_query(request))

    async def topic(self, request: Request, caller: Caller) -> object:
        name = request.path_params["name"]
        found = await _available(self._console.tube).topic(name)
        return _without_ids(as_json(_known(found, f"topic {name!r} is not on this node")), caller)

    async def records(self, request: Request, caller: Caller) -> object:
        name, params = request.path_params["name"], request.query_params
        self._check_records(name, caller)
        start = params.get("from", "newest")
        if start not in _STARTS:
            raise LocalProtocolError(f"from={start[:40]!r}", hint=f"use {', '.join(_STARTS)}")
        partition = number_of(request, "partition", 0, 0, 1 << 31) if "partition" in params else None
        wanted = {each: params.get(each, "") for each in ("key", "attribute", "json")} | {"text": params.get("q", "")}
        query = RecordQuery(
            partition=partition,
            start=start,
            at=number_of(request, "at", 0),
            wanted=RecordFilter(**wanted),
            after=params.get("after"),
            limit=_limit(request),
            whole="format" in params,
        )
        found = await _available(self._console.tube).browser.records(name, query)
        found = _known(found, f"topic {name!r} is not on this node")
        chosen = {"topic": name, "from": start, "at": query.at, "partition": partition, **wanted}
        parameters = {each: value for each, value in chosen.items() if value}
        await self._record_read("read_records", caller, parameters, again=query.after is not None)
        return found

    async def record(self, request: Request, caller: Caller) -> object:
        name, partition, offset = (request.path_params[each] for each in ("name", "partition", "offset"))
        self._check_records(name, caller)
        found = _available(self._console.tube).browser.record(name, partition, offset)
        found = _known(found, f"topic {name!r} has no record at offset {offset} of partition {partition}")
        await self._access.record("read_records", caller, {"topic": name, "partition": partition, "offset": offset})
        return found

    def _check_records(self, topic: str, caller: Caller) -> None:
        granted = self._granted(caller)
        if granted is not None and not granted.may_consume(topic, CONSOLE_GROUP):
            what = f"user {caller.user!r} may not consume topic {topic!r} with group {CONSOLE_GROUP!r}"
            raise ApiFailure(403, "forbidden", what, _POLICY)

    async def _record_read(self, method: str, caller: Caller, parameters: Mapping[str, object], *, again: bool) -> None:
        """Write an entry of a read; once a minute if it may repeat one (``again``): a live list has one a second."""
        of = str(parameters.get("topic") or parameters.get("pipeline"))
        reader = (method, caller.credential, caller.user, caller.address, of)
        now = time.monotonic()
        if again and now - self._reads.get(reader, -READ_ENTRY_S) < READ_ENTRY_S:
            return
        if len(self._reads) >= 1000:
            self._reads.clear()
        self._reads[reader] = now
        await self._access.record(method, caller, parameters)

    async def brokers(self, request: Request, _caller: Caller) -> object:
        return await _available(self._console.tube).brokers(_query(request))

    async def groups(self, request: Request, _caller: Caller) -> object:
        return await _available(self._console.tube).groups(_query(request))

    async def group(self, request: Request, caller: Caller) -> object:
        name = request.path_params["name"]
        found = await _available(self._console.tube).group(name)
        return _without_ids(as_json(_known(found, f"group {name!r} has neither members nor offsets")), caller)

    async def reset(self, request: Request, caller: Caller) -> object:
        name, to, dry_run = request.path_params["name"], request.query_params.get("to", ""), _flag(request, "dry_run")
        topic = request.query_params.get("topic") or None
        partition = number_of(request, "partition", 0) if request.query_params.get("partition") else None
        only = {key: value for key, value in (("topic", topic), ("partition", partition)) if value is not None}
        try:
            found = await _available(self._console.tube).reset(
                name, to, dry_run=dry_run, topic=topic, partition=partition,
                expected=request.query_params.get("digest") or None,
            )  # fmt: skip
        except RefusedError as error:
            raise ApiFailure.of(error, 409, "refused") from None
        except StorageError as error:
            raise ApiFailure.of(error, 503, "storage_failed") from None
        found = _known(found, f"group {name!r} has no such offsets on this node")
        if not dry_run:
            await self._access.record(
                "reset_offsets", caller, {"group": name, "to": to, **only, "partitions": found.partitions}
            )
        return found

    # Pipelines

    async def pipelines(self, request: Request, _caller: Caller) -> object:
        return await _available(self._console.pipelines).pipelines(_query(request))

    async def pipeline(self, request: Request, _caller: Caller) -> object:
        name = request.path_params["name"]
        return _known(
            _available(self._console.pipelines).pipeline(name), f"pipeline {name!r} has no status in the state store"
        )

    async def dead_letters(self, request: Request, _caller: Caller) -> object:
        name, views = self._managed(request), _available(self._console.pipelines)
        before = views.pipeline(name)
        rows = (await self._dead_letter_command(name, "list", ["--all"])).rows
        views.count_letters(before, sum(row.get("open", 0) + row.get("corrected", 0) for row in rows))
        return {"rows": rows, "next": None, "total": len(rows), "matched": len(rows)}

    async def dead_letter_records(self, request: Request, caller: Caller) -> object:
        name, limit, step = self._managed(request), min(_limit(request), 100), request.query_params.get("step", "")
        # One more than wanted, to know whether there are more.
        options = [f"--limit={limit + 1}", *_selection(request)]
        rows = (await self._dead_letter_command(name, "show", options)).rows
        await self._access.record(
            "read_dead_letters", caller, {"pipeline": name, "step": step, "letters": len(rows[:limit])}
        )
        return {"rows": rows[:limit], "complete": len(rows) <= limit}

    async def change_dead_letters(self, request: Request, caller: Caller) -> object:
        name, verb, dry_run = self._managed(request), request.path_params["verb"], _flag(request, "dry_run")
        if verb not in _CHANGES:
            raise ApiFailure(404, "not_found", f"{verb!r} is not an action", f"use {', '.join(_CHANGES)}")
        options, payload = _selection(request), b""
        if verb == "correct":
            payload = await body_of(request, _MAX_PAYLOAD, "the payload")
            options.append("--value-file=-")
        elif verb != "redrive":
            options.append("--yes")
        if verb == "purge":
            options.append(f"--older-than={request.query_params.get('older_than', '')}")
        if dry_run:
            options.append("--dry-run")
        parameters = {"pipeline": name, **dict(request.query_params)}
        found = await self._dead_letter_command(name, verb, options, payload)
        if not dry_run:
            await self._access.record(f"{verb}_dead_letters", caller, parameters)
        (row,) = found.rows
        return {"letters": row.get("chosen", row.get("letters")), "dry_run": dry_run, "notes": found.notes}

    def _managed(self, request: Request) -> str:
        name: str = request.path_params["name"]
        if name not in self._commands.pipelines:
            hint = "add it to `pipelines` in the configuration of the node, and restart it"
            raise ApiFailure(404, "not_found", f"pipeline {name!r} is not in the configuration of this node", hint)
        return name

    async def _dead_letter_command(
        self, name: str, verb: str, options: list[str], payload: bytes = b""
    ) -> CommandResult:
        return await _command_result(self._commands.dead_letters(name, verb, options, payload))

    async def plan(self, request: Request, _caller: Caller) -> object:
        found = await _command_result(self._commands.plan(self._managed(request)))
        return {"pipeline": found["pipeline"], "changes": found["changes"]}

    async def ledger(self, request: Request, _caller: Caller) -> object:
        rows = await _command_result(self._commands.ledger(self._managed(request)))
        return {"rows": rows, "next": None, "total": len(rows), "matched": len(rows)}

    async def job(self, request: Request, caller: Caller) -> object:
        kind, name = _kind(request), self._managed(request)
        job = self._commands.job(kind, name)
        if job is not None and any(step.rows for step in job.steps):
            await self._record_read("read_sample", caller, {"pipeline": name, **job.parameters}, again=True)
        return {"job": job}

    async def start_job(self, request: Request, caller: Caller) -> object:
        kind, name = _kind(request), self._managed(request)
        parameters = _sample_options(request) if kind is JobKind.SAMPLE else {}

        async def start() -> object:
            return self._commands.start_job(kind, name, parameters)

        job = await _command_result(start())
        await self._access.record(f"{kind}_pipeline", caller, {"pipeline": name, **parameters})
        return {"job": job}

    async def cancel_job(self, request: Request, caller: Caller) -> object:
        kind, name = _kind(request), self._managed(request)
        job = await self._commands.cancel_job(kind, name)
        await self._access.record(f"cancel_{kind}", caller, {"pipeline": name})
        return {"job": job}


_AUDIT: Final = ("time", "server", "method", "user", "credential", "address", "parameters", "result", "errMsg",
                 "failed")  # fmt: skip
"""Fields of the entries of the audit trail that are shown."""
_POLICY: Final = "add a rule to the policy file, or sign in as another user"
CONSOLE_GROUP: Final = "console"
"""The consumer group whose permissions apply to the records that a user reads in the console."""


def api_routes(
    console: Console,
    server: MqttServer,
    identify: Identify,
    trail: AuditTrail,
    names: Collection[str],
    backups: Callable[[], Backups | None],
    commands: PipelineCommands,
    permissions: Callable[[str], Permissions | None] = lambda _: None,
    clients: ConsoleClients | None = None,
    reload: Callable[[], dict[str, object]] | None = None,
) -> list[Route]:
    """Routes of the API. ``names``: further host names for requests over loopback; ``backups`` returns those of the
    node, None before it is ready; ``permissions`` returns those of a user by the policies, None for all; ``clients``:
    connections for users; ``reload`` reads the configuration again, and returns what changed, or raises PenstockError.
    """
    access = ApiAccess("node", identify, trail, names)
    api = _Api(console, server, access, trail, commands, permissions, clients or ConsoleClients(server), reload)
    route = api.route
    return [
        route("/session", api.session),
        route("/audit", api.audit, Role.ADMINISTRATOR),
        route("/overview", api.overview),
        route("/health", api.health),
        route("/history", api.history),
        route("/cluster", api.cluster, Role.VIEWER),
        route("/rules", api.rules),
        route("/topics", api.topics),
        route("/topics/{name}", api.topic),
        route("/topics/{name}/records", api.records, Role.VIEWER),
        route("/topics/{name}/records/{partition:number}/{offset:number}", api.record, Role.VIEWER),
        route("/brokers", api.brokers),
        route("/groups", api.groups),
        route("/groups/{name:path}", api.group),
        route("/groups/{name:path}/reset", api.reset, Role.OPERATOR, method="POST"),
        route("/pipelines", api.pipelines, Role.VIEWER),
        route("/pipelines/{name:path}/dead-letters", api.dead_letters, Role.OPERATOR),
        route("/pipelines/{name:path}/dead-letters/records", api.dead_letter_records, Role.OPERATOR),
        route("/pipelines/{name:path}/dead-letters/{verb}", api.change_dead_letters, Role.OPERATOR, method="POST"),
        route("/pipelines/{name:path}/plan", api.plan, Role.OPERATOR),
        route("/pipelines/{name:path}/ledger", api.ledger, Role.OPERATOR),
        *(
            route(f"/pipelines/{{name:path}}/{kind}", handler, Role.OPERATOR, method)
            for kind in JobKind
            for method, handler in (("GET", api.job), ("POST", api.start_job), ("DELETE", api.cancel_job))
        ),
        route("/pipelines/{name:path}", api.pipeline, Role.VIEWER),
        route("/events", api.events, Role.VIEWER),
        route("/clients", api.clients, Role.VIEWER),
        route("/clients/{name:text}", api.client, Role.VIEWER),
        route("/clients/{name:text}", api.disconnect, Role.OPERATOR, method="DELETE"),
        route("/subscriptions", api.subscriptions, Role.VIEWER),
        route("/retained", api.retained, Role.VIEWER),
        route("/retained/{name:text}", api.retained_message, Role.VIEWER),
        route("/topic-tree", api.topic_tree, Role.VIEWER),
        route("/messages", api.messages, Role.VIEWER),
        route("/messages", api.publish, Role.OPERATOR, method="POST"),
        route("/keys", api.keys, Role.VIEWER),
        route("/keys/{name:text}", api.key, Role.VIEWER),
        route("/keys/{name:text}", api.set_key, Role.OPERATOR, method="PUT"),
        route("/keys/{name:text}", api.delete_key, Role.OPERATOR, method="DELETE"),
        route("/key-versions/{name:text}", api.key_versions, Role.VIEWER),
        route("/key-changes", api.key_changes, Role.VIEWER),
        route("/log-levels", api.log_levels, Role.VIEWER),
        route("/log-levels/{part}", api.set_log_level, Role.ADMINISTRATOR, method="PUT"),
        route("/reload", api.reload, Role.ADMINISTRATOR, method="POST"),
        backup_route(access, backups),
    ]


async def _carried_out(change: Awaitable[T]) -> T:
    """Return the result of an operation of the broker or the state store. Raises ApiFailure."""
    try:
        return await change
    except ChangedMeanwhileError as error:
        raise ApiFailure.of(error, 409, "changed") from None
    except RefusedError as error:
        raise ApiFailure.of(error, 403, "refused") from None
    except UnavailableError as error:
        raise ApiFailure.of(error, 503, "unavailable") from None


async def _command_result(command: Awaitable[T]) -> T:
    """Return the result of a command for a pipeline. Raises ApiFailure."""
    try:
        return await command
    except RefusedError as error:
        raise ApiFailure.of(error, 409, "refused") from None
    except UnavailableError as error:
        raise ApiFailure.of(error, 503, "unavailable") from None


def _kind(request: Request) -> JobKind:
    """Return the kind of the job, which is the last part of the path."""
    return JobKind(request.scope["path"].rpartition("/")[2])  # not of the URL: a name may contain "?"


def _sample_options(request: Request) -> dict[str, str]:
    """Return the options of `penstock pipeline sample` in a request."""
    counts = {
        "records": str(number_of(request, "records", 100, 1, 10_000)),
        "limit": str(number_of(request, "limit", 5, 0, MAX_SAMPLE)),
    }
    step = request.query_params.get("step", "")
    return counts | ({"step": step} if step else {})


def _acting(caller: Caller) -> str:
    """Return the user whose permissions apply, "" for all permissions."""
    return "" if caller.administers else caller.user


def _properties(request: Request) -> Properties:
    """Return the properties of a message to publish. Raises LocalProtocolError."""
    params = request.query_params
    pairs = [text.partition("=") for text in params.getlist("user_property")]
    try:
        correlation = bytes.fromhex(params.get("correlation", ""))
    except ValueError:
        raise LocalProtocolError("correlation: the Correlation Data are not hexadecimal", hint="use 0-9, a-f") from None
    return Properties(
        payload_format_indicator=1 if _flag(request, "text") else None,
        message_expiry_interval=number_of(request, "expiry_s", 0, 0, (1 << 32) - 1) or None,
        content_type=params.get("content_type") or None,
        response_topic=params.get("response_topic") or None,
        correlation_data=correlation or None,
        user_properties=[(name, value) for name, _, value in pairs if name],
    )


def _token(request: Request) -> Hlc | None:
    text = request.query_params.get("fencing_token", "")
    found = parse(text) if text else None
    if text and found is None:
        raise LocalProtocolError(f"fencing_token={text[:80]!r}", hint="use a version: MILLISECONDS:COUNTER:NODE")
    return found


class _LinesResponse(StreamingResponse):
    """Lines of JSON while the client is connected."""

    def __init__(self, subscription: LiveSubscription) -> None:
        self._subscription = subscription
        # nginx would otherwise collect lines until its buffer is full, or the response ends.
        headers = {**HEADERS, "X-Accel-Buffering": "no"}
        super().__init__(subscription.lines(), media_type="application/x-ndjson", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines; the subscription ends when the client disconnects."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._subscription.close()


def _response(request: Request, found: object) -> Response:
    if isinstance(found, Response):
        return found
    body = json.dumps(as_json(found), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    if request.method != "GET":
        return Response(body, media_type="application/json", headers=HEADERS)
    tag = f'"{blake2b(body, digest_size=12).hexdigest()}"'
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


def _selection(request: Request) -> list[str]:
    """Return the options of a command that select dead letters: ``step``, ``id`` (repeatable) and ``all``."""
    params = request.query_params
    options = [f"--step={step}" for step in params.getlist("step") if step]
    options += [f"--id={one}" for one in params.getlist("id")]
    return [*options, "--all"] if _flag(request, "all") else options


def _with(request: Request, **parameters: str) -> Request:
    """Return the request with other query parameters."""
    query = urlencode({**request.query_params, **parameters}).encode()
    return Request({**request.scope, "query_string": query}, request.receive)


def _export(kind: str, first: object, read: Callable[[str], Awaitable[object]]) -> Response:
    """Stream all rows of a list page by page, with the filter and order of the request.

    Raises:
        LocalProtocolError: the format is not known, or the response is not a list.
    """
    if kind not in _FORMATS or not isinstance(first, Page | RecordPage):
        raise LocalProtocolError(f"format={kind!r}", hint="use csv or ndjson, for a list with pages")

    async def lines() -> AsyncIterator[bytes]:
        page: Any = first
        head = kind == "csv"
        while True:
            rows: list[dict[str, object]] = [_object(row) for row in page.rows]
            if kind == "ndjson":
                yield "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8", "replace")
            elif rows:
                text = io.StringIO()
                writer = csv.DictWriter(text, list(rows[0]))
                if head:
                    writer.writeheader()
                writer.writerows({name: _csv_cell(value) for name, value in row.items()} for row in rows)
                head = False
                yield text.getvalue().encode("utf-8", "replace")
            if page.next is None:
                return
            page = await read(page.next)

    headers = {**HEADERS, "Content-Disposition": f'attachment; filename="penstock.{kind}"'}
    return StreamingResponse(lines(), media_type=_FORMATS[kind], headers=headers)


def _object(row: object) -> dict[str, object]:
    found = as_json(row)
    assert isinstance(found, dict), "rows are snapshots"
    return found


def _csv_cell(value: object) -> object:
    """Return a CSV cell that spreadsheets do not interpret as a formula, because clients choose names."""
    if isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        value = " ".join(each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in value)
    return f"'{value}" if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t", "\r"} else value


def _available(view: Any) -> Any:
    if view is None:
        raise ApiFailure(503, "starting", _STARTING, "wait until /readyz returns 200")
    return view


def _known(found: Any, what: str, hint: str | None = None) -> Any:
    if found is None:
        raise ApiFailure(404, "not_found", what, hint)
    return found


def _without_ids(found: Any, caller: Caller) -> object:
    """Hide client ids from callers without credentials, as the administration does."""
    if caller.identified:
        return found
    for row in (*found.get("partitions", ()), *found.get("groups", ())):
        if row.get("member") is not None:
            row["member"] = "-"
    for row in found.get("members", ()):
        row["member"] = row["address"] = "-"
    return found


def _readable(key: Key, granted: Permissions) -> Key:
    """Return the key without its value if the permissions do not include reading it."""
    return key if granted.may_read(base64.b64decode(key.key_base64)) else replace(key, value=None, value_base64=None)


def _key_of(request: Request) -> tuple[str, bytes]:
    """Return the key in the path of a request, as text for people and as bytes. Raises LocalProtocolError."""
    return _decoded_key(request, request.path_params["name"])


def _decoded_key(request: Request, name: str) -> tuple[str, bytes]:
    """Return ``name`` as a key; ``encoding=base64`` in the request: its bytes are in base64."""
    encoding = request.query_params.get("encoding", "text")
    if encoding == "text":
        return name, name.encode()
    if encoding != "base64":
        raise LocalProtocolError(f"encoding={encoding[:40]!r}", hint="use text or base64")
    try:
        return f"base64:{name}", base64.b64decode(name, validate=True)
    except ValueError:
        raise LocalProtocolError(f"key {name[:40]!r} is not base64", hint="leave out encoding=base64") from None


def _query(request: Request) -> PageQuery:
    params = request.query_params
    return PageQuery(
        text=params.get("q", ""), sort=params.get("sort", ""), after=params.get("after"), limit=_limit(request)
    )


def _limit(request: Request) -> int:
    return number_of(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)


def _flag(request: Request, name: str) -> bool:
    return request.query_params.get(name, "") not in {"", "0", "false"}
