"""A pipeline as data: what the YAML file may say, checked without Spark."""

from penstock.pipelines.model.pipeline import DeadLetters, Pipeline, StateStore, json_schema, load
from penstock.pipelines.model.sinks import (
    SINK_KINDS,
    ConsoleSink,
    Entry,
    Messages,
    MqttSink,
    Sink,
    StateStoreSink,
    TableSink,
    TubeSink,
)
from penstock.pipelines.model.sources import (
    SOURCE,
    FilesSource,
    MqttSource,
    RateSource,
    Source,
    StateStoreSource,
    TubeOptions,
    TubeSource,
)
from penstock.pipelines.model.steps import STEP_KINDS, Dedupe, Enrich, Map, Parse, Step, Window

__all__ = [
    "SINK_KINDS",
    "SOURCE",
    "STEP_KINDS",
    "ConsoleSink",
    "DeadLetters",
    "Dedupe",
    "Enrich",
    "Entry",
    "FilesSource",
    "Map",
    "Messages",
    "MqttSink",
    "MqttSource",
    "Parse",
    "Pipeline",
    "RateSource",
    "Sink",
    "Source",
    "StateStore",
    "StateStoreSink",
    "StateStoreSource",
    "Step",
    "TableSink",
    "TubeOptions",
    "TubeSink",
    "TubeSource",
    "Window",
    "json_schema",
    "load",
]
