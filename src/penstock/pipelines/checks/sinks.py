"""What a pipeline file may say of its sinks of messages, beyond the type of each value."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ConfigError
from penstock.pipelines.checks.problem import Problem
from penstock.pipelines.model import MqttSink, Pipeline, TubeOptions, TubeSink
from penstock.pipelines.model.sources import as_texts
from penstock.pipelines.model.values import lease_key, pieces
from penstock.spark.login_options import LOGIN_OPTIONS
from penstock.spark.mqtt.options import MqttWriteOptions
from penstock.spark.tube.sink_options import SinkOptions

__all__ = ["fence_prefixes", "message_sinks"]

_ID = "id"
"""The name under which a message carries its identity."""


def message_sinks(pipeline: Pipeline) -> Iterator[Problem]:
    """What is wrong with the tubemq and mqtt sinks."""
    for index, sink in enumerate(pipeline.sinks):
        where = ("sinks", index, sink.kind)
        if sink.tubemq is not None:
            yield from _tube(pipeline, sink.tubemq, where)
            yield from _named(sink.tubemq.headers, (*where, "headers"))
        if sink.mqtt is not None:
            yield from _mqtt(sink.mqtt, where)
            yield from _named(sink.mqtt.properties, (*where, "properties"))


def fence_prefixes(pipeline: Pipeline) -> Iterator[Problem]:
    """Prefixes that fence other keys than those of their sink."""
    for index, sink in enumerate(pipeline.sinks):
        if sink.statestore is None:
            continue
        starts = [_start(entry.key) for entry in sink.statestore.entries]
        for number, prefix in enumerate(sink.statestore.fence_prefixes):
            where = ("sinks", index, "statestore", "fence_prefixes", number)
            if not any(start.startswith(prefix) for start in starts):
                yield Problem(
                    where, prefix, f"expected the start of a key of this sink: {', '.join(map(repr, starts))}"
                )
            elif lease_key(pipeline.name).startswith(prefix):
                yield Problem(where, prefix, "expected a prefix that leaves the pipeline's lease out")


def _start(template: str) -> str:
    """What every key of ``template`` starts with."""
    first = pieces(template)[0]
    return "" if first.column else first.text


def _tube(pipeline: Pipeline, sink: TubeSink, where: tuple[str | int, ...]) -> Iterator[Problem]:
    of_pipeline = [name for name in sink.options if not name.lower().startswith("tubemq.")]
    if sink.master is None and pipeline.master is None:
        yield Problem((*where, "master"), None, "expected the masters of a tube: no source of this file names any")
    elif of_pipeline:
        known = ", ".join(LOGIN_OPTIONS)
        yield Problem((*where, "options", of_pipeline[0]), of_pipeline[0], f"expected one of {known}")
    elif sink.master is not None or sink.options:
        try:
            SinkOptions.parse({"tubemq.master": sink.master or pipeline.master or "", **as_texts(sink.options)})
        except ConfigError as error:
            part = "options" if sink.options and error.option != "tubemq.master" else "master"
            text = f"{error.what}; {error.do}" if error.do else error.what
            yield Problem((*where, part), getattr(sink, part), text)
    parts = pieces(sink.topic)
    if any(part.column for part in parts):
        return
    topic = "".join(part.text for part in parts)
    if not topic.strip():
        yield Problem((*where, "topic"), sink.topic, "expected the name of a topic")
    elif any(
        topic in source.tube_topics() and (sink.master or pipeline.master) == source.master
        for source in pipeline.inputs.values()
        if isinstance(source, TubeOptions)
    ):
        yield Problem((*where, "topic"), sink.topic, "expected another topic: the pipeline would read what it writes")


def _mqtt(sink: MqttSink, where: tuple[str | int, ...]) -> Iterator[Problem]:
    # A column stands for one character that any topic may have.
    shape = "".join("x" if part.column else part.text for part in pieces(sink.topic))
    try:
        MqttWriteOptions.parse({"mqtt.broker": "mqtt://127.0.0.1", "topic": shape})
    except ConfigError as error:
        yield Problem((*where, "topic"), sink.topic, f"expected a topic that can be published to: {error.why}")


def _named(templates: dict[str, str], where: tuple[str | int, ...]) -> Iterator[Problem]:
    for name, template in templates.items():
        if name == _ID or not name:
            yield Problem(
                (*where, name), template, "expected another name: the pipeline sets `id`, by which copies are told"
            )
