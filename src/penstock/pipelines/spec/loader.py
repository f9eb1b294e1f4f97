"""Load a pipeline file: YAML with variables, checked value by value and then as a whole.

``load`` returns a ``Pipeline`` whose references are valid: each step reads a source or an earlier step, names are
unique, durations can be parsed. An error that only Spark can detect, such as an unknown column in an expression, is
reported when the queries are built, before any record is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.sources import TUBE_FORMATS
from penstock.pipelines.spec.validation import problems_as_error
from penstock.pipelines.spec.values import BROKER_VARIABLE, MASTER_VARIABLE, directory
from penstock.runtime.config import loader as config
from penstock.runtime.config.yaml_document import Document, Value, parse_document, read_document

__all__ = ["json_schema", "load", "parse"]


def load(path: Path | str, environment: Mapping[str, str] | None = None) -> Pipeline:
    """The pipeline of the file at ``path``, with ``${VAR:-default}`` filled in from the environment.

    If the file names no broker or no tube master, ``PENSTOCK_BROKER`` and ``PENSTOCK_TUBE_MASTER`` do.
    ``environment``: another than the process's own.

    Raises:
        ConfigError: names file, line, column and option, the value and the accepted values.
    """
    environment = os.environ if environment is None else environment
    return _validated(read_document(Path(path), environment), Path(path).parent, environment)


def parse(text: str, *, name: str, environment: Mapping[str, str] | None = None) -> Pipeline:
    """As :func:`load`, from text in memory; messages call the file ``name``."""
    environment = os.environ if environment is None else environment
    return _validated(parse_document(text, name, environment), Path(), environment)


def _validated(document: Document, parent: Path, environment: Mapping[str, str]) -> Pipeline:
    """The pipeline in ``document``; other files that it names are relative to ``parent``."""
    before = directory.set(parent)
    try:
        _fill_addresses(document, environment)
        return config.validate(document, Pipeline, problems_as_error)
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
