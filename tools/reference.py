"""Write the reference pages that have one source: commands, configuration, pipeline file, record, options, conformance.

Usage: reference.py [--check]

``--check`` writes nothing and exits with 1 when a page differs from what the code says.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from penstock.cli.main import COMMANDS, app
from penstock.node.config import node
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.spark.mqtt import options as mqtt_spark
from penstock.spark.statestore import options as store
from penstock.spark.tube import options as spark
from penstock.spark.tube import sink_options as sink
from penstock.statestore.codec import commands, dialects
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.hlc import Hlc
from penstock.tube import record

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
NOTE = "<!-- Written by tools/reference.py from the code; change the code, then run `make reference`. -->"


def command_pages(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    """``command``, called ``name``, and each command below it with its help, depth first."""
    # The parent's context is where its settings come from, as when it is called.
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield context.command_path, command.get_help(context)
    for child_name, child in sorted(getattr(command, "commands", {}).items()):
        yield from command_pages(child, child_name, context)


def cli() -> str:
    lines = ["# Command line", "", NOTE, ""]
    root = typer.main.get_command(app)
    context = root.make_context("penstock", [], resilient_parsing=True, terminal_width=100, max_content_width=100)
    pages = [("penstock", root.get_help(context))]
    for name, entry in COMMANDS.items():
        command = typer.main.get_command(importlib.import_module(entry.module).app)
        pages += command_pages(command, name, context)
    for path, text in pages:
        lines += [f"## {path}", "", "```text", *(line.rstrip() for line in text.strip().splitlines()), "```", ""]
    return "\n".join(lines)


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def schema_type(schema: dict[str, Any]) -> str:
    """A property of a JSON Schema in words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    branches = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if branches:
        return " or ".join(schema_type(part) for part in branches if part.get("type") != "null")
    if schema.get("type") == "array":
        return f"list of {schema_type(schema.get('items', {}))}"
    values = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
    if schema.get("type") == "object" and isinstance(values[0], dict):
        return f"map of name to {schema_type(values[0])}"
    return {"integer": "number", "string": "text", "boolean": "true or false"}.get(str(schema.get("type")), "any")


def default_of(schema: dict[str, Any], *, required: bool) -> str:
    if required:
        return "required"
    value = schema.get("default")
    if value is None or value in ({}, []) or isinstance(value, dict):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def model_tables(model: type[BaseModel], title: str) -> list[str]:
    """A table for the model and one for each model inside it."""
    schema = model.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = schema.get("$defs", {})
    lines = []
    for name, part in [(title, schema), *definitions.items()]:
        if part.get("type") != "object":
            values = ", ".join(f"`{value}`" for value in part.get("enum", []))
            lines += [f"## {name}", "", f"One of {values}.", ""]
            continue
        lines += [f"## {name}", "", " ".join(str(part.get("description", "")).split()), ""]
        lines += ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
        required = set(part.get("required", []))
        for key, prop in part.get("properties", {}).items():
            default = default_of(prop, required=key in required)
            lines.append(f"| `{key}` | {cell(schema_type(prop))} | {default} | {cell(prop.get('description', ''))} |")
        lines.append("")
    return lines


def configuration() -> str:
    lines = ["# Configuration", "", NOTE, ""]
    lines += [
        (
            "`penstock up` reads `penstock.yaml` in the working directory, or the file that `--config` names. A flag "
            "goes before a variable of the environment, that before the file, that before the default. `${VAR}` and "
            "`${VAR:-default}` in the file are filled in from the environment, "
            "`${file:PATH}` with the first line of that file, which is for secrets. A listener may be written short: "
            "`mqtt: 127.0.0.1:1883`."
        ),
        "",
        "| flag | variable | in the file |",
        "| --- | --- | --- |",
    ]
    lines += [f"| `--{o.flag}` | `{o.variable}` | `{'.'.join(o.location)}` |" for o in node.OPTIONS]
    return "\n".join([*lines, "", *model_tables(node.NodeConfig, "penstock.yaml")])


def pipeline_file() -> str:
    lines = ["# Pipeline file", "", NOTE, ""]
    lines += [
        (
            "One YAML file describes a pipeline; `penstock pipeline validate FILE` checks it without Spark. `${VAR}` "
            "and `${VAR:-default}` are filled in from the environment, `${file:PATH}` with the first line of a file: "
            "for secrets, no message shows it. A path that is not absolute begins beside the pipeline file."
            "\n\n"
            "Addresses: `statestore.broker` and the `master` of a source come from the file; if the file has none, "
            "from `PENSTOCK_BROKER` and `PENSTOCK_TUBE_MASTER`; else they are "
            "`mqtt://127.0.0.1:1883` and `127.0.0.1:8715`. "
            "The file comes first: it may read several tubes, and it belongs to the state store that has its lease. "
            "To let the environment decide over an address in the file, write `${PENSTOCK_BROKER:-mqtt://HOST:1883}`. "
            "With `pipeline submit --deploy-mode cluster`, give the variables with `--env`."
        ),
        "",
    ]
    return "\n".join([*lines, *model_tables(Pipeline, "The file")])


def record_table() -> str:
    lines = ["# Record format", "", NOTE, ""]
    lines += [
        (
            "What a record of the tube carries beside its value. The body of the TubeMQ message is the value, "
            "untouched. Everything else is an attribute whose value is percent-encoded, since TubeMQ's attributes "
            "allow no `,`, `=` or blank. Rules, producers, the Spark source and the command line share this table."
        ),
        "",
        "| field | attribute | type | meaning |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| `{f.name}` | `{f.attribute}` | `{cell(f.type)}` | {cell(f.meaning)} |" for f in record.FIELDS]
    lines += [
        "",
        (
            "In Spark: `key` and `value` as above, `timestamp` is the time at which the broker took the record, "
            "`headers` are the decoded attributes: those of this table, then the user properties by their names."
        ),
        "",
    ]
    return "\n".join(lines)


def option_table(title: str, options: Mapping[str, str], unsupported: Mapping[str, str]) -> list[str]:
    lines = [f"## {title}", "", "| option | meaning | default |", "| --- | --- | --- |"]
    for name, text in options.items():
        # What holds without the option stands last, in parentheses.
        meaning, _, default = text.removesuffix(")").rpartition(" (")
        lines.append(f"| `{name}` | {cell(meaning)} | {cell(default)} |")
    lines += ["", "Refused, and what to do instead:", "", "| option | instead |", "| --- | --- |"]
    return [*lines, *(f"| `{name}` | {cell(instead)} |" for name, instead in unsupported.items()), ""]


def spark_options() -> str:
    lines = ["# Spark format options", "", NOTE, ""]
    lines += [
        (
            "Names, and words as values, are compared without regard to case. Numbers are whole and above 0, times are "
            "in ms where no unit is named. An option that is not listed, or a value that cannot be used, is an error "
            "when Spark loads or begins to write, before a record is touched; it names the option, what was given and "
            "what is accepted, and of a misspelt option the nearest one."
        ),
        "",
    ]
    lines += option_table("`tubemq`, reading", spark.OPTIONS, spark.UNSUPPORTED)
    lines += option_table("`tubemq`, writing", sink.OPTIONS, sink.UNSUPPORTED)
    lines += option_table("`aio-statestore`, reading", store.READ_OPTIONS, store.UNSUPPORTED)
    lines += option_table("`aio-statestore`, writing", store.WRITE_OPTIONS, store.UNSUPPORTED)
    lines += option_table("`mqtt`, reading", mqtt_spark.READ_OPTIONS, mqtt_spark.UNSUPPORTED)
    lines += option_table("`mqtt`, writing", mqtt_spark.WRITE_OPTIONS, mqtt_spark.UNSUPPORTED)
    return "\n".join(lines)


VERSION = Hlc(1696374425000, 1, "StateStore")
DIALECT_ROWS: dict[str, Callable[[dialects.Dialect], str]] = {
    "condition not met": lambda d: f"`{d.condition_not_met.decode().strip()}`",
    "delete and expiry event": lambda d: f"`{d.delete_event.decode()}`",
    "text of a lower fencing token": lambda d: "… " + " ".join(d.fence_lower.split()[5:9]) + " …",
    "printed versions": lambda d: f"`{(VERSION.padded() if d.padded_versions else str(VERSION))}`",
    "`__stat`, `__protVer`; other major versions refused with 505": lambda d: "yes" if d.status else "no",
    "version of a delete, in its answer and notification": lambda d: (
        "of the delete" if d.delete_version else "of the deleted value"
    ),
    "time stamp and fencing token in": lambda d: f"`{d.timestamp_property}`, `{d.fence_property}`",
}


def state_store() -> str:
    from penstock.node import capture
    from tools import statestore_commands

    notes = (ROOT / "tools" / "state-store.md").read_text(encoding="utf-8").split("<!-- next -->")
    command_notes, error_order, request_rules, extension_forms = (note.strip() for note in notes)
    lines = ["# State store protocol", "", NOTE, "", "## Commands", ""]
    lines += ["| command | written | access | what it does | offered |", "| --- | --- | --- | --- | --- |"]
    for spec in commands.COMMANDS.values():
        offered = statestore_commands.OFFERED[spec.extension]
        access = (spec.access.name or "").capitalize()
        page = f"[{spec.verb}](state-store/{spec.verb.lower()}.md)"
        lines.append(f"| {page} | `{cell(spec.syntax)}` | {access} | {cell(spec.summary)} | {offered} |")
    lines += ["", command_notes, "", "## Forms", ""]
    lines += [
        (
            "A request chooses its form: with `__protVer` it is the form of the Azure IoT Operations SDKs, on the "
            "older topic the older form, else the published one. All work side by side on one store; the option "
            "`statestore.dialect` forces one."
        ),
        "",
        "| | " + " | ".join(dialects.DIALECTS) + " |",
        "| --- |" + " --- |" * len(dialects.DIALECTS),
    ]
    for title, show in DIALECT_ROWS.items():
        lines.append(f"| {title} | " + " | ".join(show(dialect) for dialect in dialects.DIALECTS.values()) + " |")
    lines += ["", "## Errors", "", "After `-ERR `, exactly; where several apply, the first of the order below:", ""]
    lines += [f"* `{error}`" for error in StoreError]
    lines += ["", error_order, "", request_rules, "", extension_forms, "", "## Change capture", ""]
    lines += [
        (
            "With `statestore.capture_topic` every change becomes a record of partition "
            f"{capture.CAPTURE_PARTITION} of that tube topic, in the order of the versions, none lost and none twice:"
        ),
        "",
        "| attribute | what it is |",
        "| --- | --- |",
    ]
    rows = [line for line in (capture.__doc__ or "").splitlines() if line.startswith("``")]
    lines += [f"| {' | '.join(part.replace('``', '`') for part in row.split(None, 1))} |" for row in rows]
    lines += [
        "",
        (
            "While the tube takes nothing (no room, a failed disk) the store goes on: changes wait in its log on disk, "
            f"{capture.MAX_WAITING_BYTES >> 20} MiB of them in memory too. Then `/readyz` says among its `warnings` "
            "for how long nothing has moved, and why. `penstock_capture_waiting` is how many changes the topic does "
            "not have yet, `penstock_capture_oldest_age_seconds` how old the first of them is."
        ),
    ]
    return "\n".join([*lines, ""])


def mqtt_conformance() -> str:
    from tools import conformance

    return conformance.page(NOTE)


def mqtt_differences() -> str:
    from tools import differences

    return differences.page(NOTE)


def tubemq() -> str:
    from tools import tubemq_table

    return tubemq_table.page(NOTE)


GENERATED = {
    "cli.md": cli,
    "configuration.md": configuration,
    "pipeline-file.md": pipeline_file,
    "mqtt-conformance.md": mqtt_conformance,
    "mqtt-differences.md": mqtt_differences,
    "record.md": record_table,
    "spark-options.md": spark_options,
    "state-store.md": state_store,
    "tubemq-compatibility.md": tubemq,
}


def generated() -> dict[str, Callable[[], str]]:
    """What writes each page."""
    sys.path.insert(0, str(ROOT))  # a script's own directory is there, not the one above it
    from tools import statestore_commands

    return GENERATED | statestore_commands.pages(NOTE, ROOT / "tools" / "state-store-commands.md")


def main() -> int:
    check = "--check" in sys.argv[1:]
    differing = []
    for name, write in generated().items():
        page, text = PAGES / name, write().rstrip() + "\n"
        page.parent.mkdir(exist_ok=True)
        if check and (not page.exists() or page.read_text(encoding="utf-8") != text):
            differing.append(name)
        elif not check:
            page.write_text(text, encoding="utf-8")
    if differing:
        print(f"docs/reference: {', '.join(differing)}: not what the code says", file=sys.stderr)
        print("  do:  run `make reference` and commit the pages", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
