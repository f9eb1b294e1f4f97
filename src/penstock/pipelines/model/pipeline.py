"""A pipeline as data: what the YAML file may say, checked without Spark.

``load`` gives a ``Pipeline`` whose references are known to hold: every step reads one that stands before it, names are
unique, durations are durations. What only Spark can know (a column that an expression names) is found when the
pipeline is built, before anything is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from penstock.pipelines.model.part import Part, directory
from penstock.pipelines.model.sinks import Sink, TubeSink
from penstock.pipelines.model.sources import SOURCE, TUBE_FORMATS, Source, TubeOptions, as_texts
from penstock.pipelines.model.steps import Step
from penstock.pipelines.model.values import BROKER_VARIABLE, MASTER_VARIABLE, BrokerUrl, Duration, Name
from penstock.runtime import config
from penstock.runtime.document import Document, Value, read_document

__all__ = ["DeadLetters", "Pipeline", "StateStore", "json_schema", "load"]


class StateStore(Part):
    """The MQTT broker that the state store answers on."""

    broker: BrokerUrl = Field(
        default="mqtt://127.0.0.1:1883",
        description="if left out, the variable PENSTOCK_BROKER counts before this default",
    )


class DeadLetters(Part):
    """The Parquet table of records that could not be processed: reason, coordinates, headers, original bytes."""

    path: str = Field(min_length=1)


class Pipeline(Part):
    """One pipeline file."""

    name: Name
    source: Source | None = Field(default=None, description="the only source; steps know it as `source`")
    sources: dict[Name, Source] = Field(
        default_factory=dict, description="several sources by name, instead; steps say which they read with `from`"
    )
    statestore: StateStore = StateStore()
    trigger: Duration = Field(default="500 milliseconds", description="how often new records are looked for")
    steps: list[Step] = Field(default_factory=list)
    sinks: list[Sink] = Field(min_length=1)
    dead_letters: DeadLetters | None = None

    @property
    def inputs(self) -> dict[str, Source]:
        """The sources by the names that steps know them by."""
        return dict(self.sources) if self.source is None else {SOURCE: self.source}

    @property
    def master(self) -> str | None:
        """The tube masters of the first source that reads a tube: where sinks send to that name no other."""
        return next((source.master for source in self.inputs.values() if isinstance(source, TubeOptions)), None)

    def tube_options(self, sink: TubeSink) -> dict[str, str]:
        """Where the tube of ``sink`` is, and who the pipeline is there: the same as at the source of that tube.

        Without a master where neither the sink nor a source names one.
        """
        master = sink.master or self.master
        same = (s.login() for s in self.inputs.values() if isinstance(s, TubeOptions) and s.master == master)
        given = as_texts(sink.options) if sink.options else next(same, {})
        return given if master is None else {"tubemq.master": master, **given}

    @model_validator(mode="after")
    def _one_way_to_name_sources(self) -> Pipeline:
        if (self.source is None) == (not self.sources):
            raise ValueError("expected exactly one of source, sources")
        return self

    @model_validator(mode="after")
    def _references_hold(self) -> Pipeline:
        # Imported here: the checks read the model.
        from penstock.pipelines.checks.pipeline import problems_as_error

        error = problems_as_error(self)
        if error is not None:
            raise error
        return self


def load(path: Path | str, environment: Mapping[str, str] | None = None) -> Pipeline:
    """The pipeline of the file at ``path``, with ``${VAR:-default}`` filled in from the environment.

    If the file names no broker or no tube master, ``PENSTOCK_BROKER`` and ``PENSTOCK_TUBE_MASTER`` do.
    ``environment``: another than the process's own.

    Raises:
        ConfigError: names file, line, column and option, what stands there and what is accepted.
    """
    environment = os.environ if environment is None else environment
    before = directory.set(Path(path).parent)
    try:
        document = read_document(Path(path), environment)
        _fill_addresses(document, environment)
        return config.validate(document, Pipeline)
    finally:
        directory.reset(before)


def _fill_addresses(document: Document, environment: Mapping[str, str]) -> None:
    """Put the addresses of the environment where the file has none.

    The file comes first: a pipeline belongs to the broker and the tubes that it names, whatever the shell has set for
    other commands, and its sources may read several tubes.
    """
    data = document.data
    broker, master = environment.get(BROKER_VARIABLE), environment.get(MASTER_VARIABLE)
    store = data.get("statestore", {})
    if broker and isinstance(store, dict) and "broker" not in store:
        document.put(("statestore", "broker"), broker, f"environment variable {BROKER_VARIABLE}")
    if not master:
        return
    named = data.get("sources")
    sources: dict[tuple[str, ...], Value] = {("source",): data.get("source")}
    sources |= {("sources", name): source for name, source in named.items()} if isinstance(named, dict) else {}
    tubes = {
        place: source
        for place, source in sources.items()
        if isinstance(source, dict) and source.get("format", "tubemq") in TUBE_FORMATS
    }
    for place, source in tubes.items():
        if "master" not in source:
            document.put((*place, "master"), master, f"environment variable {MASTER_VARIABLE}")
    sinks = data.get("sinks")
    for sink in sinks if isinstance(sinks, list) and not tubes else ():  # else they send to the tube of the source
        tube = sink.get("tubemq") if isinstance(sink, dict) else None
        if isinstance(tube, dict):
            tube.setdefault("master", master)


def json_schema() -> dict[str, Any]:
    """JSON Schema of the pipeline file, for editors, which see it before ``${VAR}`` is filled in."""
    schema = Pipeline.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    # A plain copy: pydantic shares parts between calls.
    plain: dict[str, Any] = json.loads(json.dumps(schema))
    _allow_variables(plain)
    return plain


_VARIABLE = r"\$\{"


def _allow_variables(node: object) -> None:
    """Let text that holds a variable stand wherever ``node`` asks for text of a form, a number, or true or false."""
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _allow_variables(inner)
    if not isinstance(node, dict):
        return
    if isinstance(node.get("pattern"), str):
        node["pattern"] = f"(?:{node['pattern']})|{_VARIABLE}"
    elif node.get("type") in ("integer", "number", "boolean"):
        kept = {name: node.pop(name) for name in list(node) if name not in ("title", "description", "default")}
        node["anyOf"] = [kept, {"type": "string", "pattern": _VARIABLE}]
