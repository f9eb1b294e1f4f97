"""Generate the reference pages from the code, and the pages of measured figures from the benchmarks' results.

Usage: reference.py [--check]

In the pages in ``LISTS`` it writes only the lists of commands, between ``<!-- commands: NAME -->`` and ``<!-- /commands
-->``. ``--check`` writes nothing and exits with status 1 if a page is out of date.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from penstock.cli.main import COMMANDS, app
from penstock.cli.parser import help_record, typer_command
from penstock.node.config import node
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.spark.mqtt import options as mqtt_spark
from penstock.spark.statestore import options as store
from penstock.spark.tube import options as spark
from penstock.statestore.codec import commands, dialects
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.hlc import Hlc
from penstock.tube import record

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
NOTE = "<!-- Written by tools/reference.py from the code; change the code, then run `make reference`. -->"


EXAMPLES = ROOT / "examples" / "reference"


def commands_below(command: Any, name: str, parent: Any) -> Iterator[tuple[Any, Any]]:
    """Yield ``command``, called ``name``, and each command below it, with their contexts, depth first."""
    # The settings come from the parent's context, as in a call.
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield command, context
    for child_name, child in sorted(getattr(command, "commands", {}).items()):
        yield from commands_below(child, child_name, context)


CLI_EXAMPLE = """\
`penstock NOUN VERB [NAME] [OPTIONS]`, for example with a node on this machine:

<!-- test: background -->
```console
$ penstock up
```

```console
$ penstock status                                     # whether the node is ready, and what to do otherwise
...
$ penstock kv set line-3/limit 42                     # state store: set a key
...
$ penstock kv get line-3/limit                        # the result is on standard output, all else on standard error
42
$ penstock tube topic create readings --partitions 1  # TubeMQ: create a topic
...
$ echo 61.5 | penstock tube produce readings          # one record for each line of standard input
...
$ penstock tube consume readings --json               # --json: an object per line, for programs
{"topic": "readings", "broker_id": 1...
$ penstock mqtt pub line-3/state on --retain          # MQTT: publish a retained message
...
$ penstock kv get line-3/other || echo "status $?"    # exit status 1: failed or refused; 2: wrong usage
...
```
"""

METRICS_EXAMPLE = """\
<!-- test: background -->
```console
$ penstock up
```

```console
$ curl -s http://${PENSTOCK_HTTP:-127.0.0.1:8080}/metrics | grep ^penstock_node_ready # 1: every part works
penstock_node_ready 1.0
```

A configuration of Prometheus that scrapes a node with users, with the credentials of one of them:

```yaml
# prometheus.yml
scrape_configs:
  - job_name: penstock
    scheme: https                       # http without `http.tls`
    basic_auth: {username: prometheus, password_file: /etc/prometheus/penstock.password}
    static_configs:
      - targets: ["edge-7.example:8080"]  # `http.bind`; each broker of its own has its own listener
```
"""


def cli() -> str:
    lines = ["# Command line", "", NOTE, "", CLI_EXAMPLE]
    root = typer.main.get_command(app)
    context = root.make_context("penstock", [], resilient_parsing=True)
    found = [(root, context)]
    for name, entry in COMMANDS.items():
        found += commands_below(typer_command(importlib.import_module(entry.module).app), name, context)
    common = common_options(found)
    lines += command_section(*found[0], common)
    lines += ["## Common options", "", "Several commands have these options, with the same meaning.", ""]
    for families in sorted(set(common.values())):
        lines += [f"### Options of {', '.join(families)}", ""]
        for option, users in common.items():
            lines += option if users == families else ()
    for command, ctx in found[1:]:
        lines += command_section(command, ctx, common)
    return "\n".join(lines)


def common_options(found: Sequence[tuple[Any, Any]]) -> dict[tuple[str, str, str], tuple[str, ...]]:
    """Return options that several commands describe in the same way, with the first words of these commands."""
    users: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for command, context in found:
        for option in described_options(command, context):
            if option[0].startswith("`-"):
                users[option].append(" ".join(context.command_path.split()[:2]))
    return {option: tuple(sorted(set(paths))) for option, paths in users.items() if len(paths) >= COMMON}


COMMON = 5
"""Number of commands from which on a common option is described only once."""


def described_options(command: Any, context: Any) -> list[tuple[str, str, str]]:
    """Yield name, description and an empty line for each option and argument."""
    found = []
    for parameter in command.get_params(context):
        if "--help" not in parameter.opts and not getattr(parameter, "hidden", False):
            names, text, facts = parameter_texts(parameter, context)
            found.append((f"`{names}`", f": {sentence(text)}{facts}".rstrip(), ""))
    return found


def command_section(command: Any, context: Any, common: Collection[tuple[str, str, str]]) -> list[str]:
    """Yield usage, description, subcommands and options of one command."""
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    lines = [f"## {context.command_path}", "", "```text", usage, "```", ""]
    lines += [paragraph(text) + "\n" for text in inspect.cleandoc(command.help or "").split("\n\n") if text]
    if examples := getattr(command, "epilog", None):
        lines += ["```text", *examples.splitlines(), "```", ""]
    children: Any = COMMANDS if context.parent is None else getattr(command, "commands", {})
    for name, child in children.items():
        anchor = f"{context.command_path} {name}".replace(" ", "-")
        about = child.help if context.parent is None else child.get_short_help_str(limit=200)
        lines += [f"* [`{name}`](#{anchor}): {paragraph(about)}"]
    lines += [""] if children else []
    options = described_options(command, context)
    for option in options:
        lines += option if option not in common else ()
    if shared := [option[0] for option in options if option in common]:
        lines += [f"[Common options](#common-options): {', '.join(shared)}.", ""]
    return lines


def parameter_texts(parameter: Any, context: Any) -> tuple[str, str, str]:
    """Return names, help, and the facts after it: variable, default, whether it is required."""
    record = help_record(parameter, context)
    if record is None:
        return parameter.make_metavar(context), getattr(parameter, "help", None) or "", ""
    names, text = record
    found = re.fullmatch(r"(.*?)\s*\[([^\[\]]*)\]", text, re.DOTALL)
    if found is None:
        return names, text, ""
    facts = ""
    for fact in found[2].split("; "):
        kind, _, value = fact.partition(": ")
        if kind == "env var":
            facts += f" Environment variable: `{value}`."
        elif kind == "default":
            facts += f" Default: {value}."
        elif fact == "required":
            facts += " Required."
        else:
            facts += f" Range: {fact}."
    return names, found[1], facts


def paragraph(text: str) -> str:
    """Return help text of the command line as Markdown: one line, with special characters escaped."""
    return re.sub(r"(?<!`)([<>*_{}$])(?!`)", r"\\\1", " ".join(text.replace("\b", "").split()))


def sentence(text: str) -> str:
    text = paragraph(text)
    return text if not text or text.endswith((".", "?", ")")) else f"{text}."


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


class Keys:
    """The keys of a YAML file, as headings with a definition list each, from the model's JSON Schema.

    A mapping that occurs at several paths is described where it occurs first; the other places link there.
    """

    def __init__(self, model: type[BaseModel], file: str) -> None:
        self.root: dict[str, Any] = model.model_json_schema(by_alias=True)
        self.definitions: dict[str, Any] = self.root.get("$defs", {})
        self.file = file
        self.described: dict[str, str] = {}
        self.undescribed: list[str] = []

    def sections(self) -> list[str]:
        """Return the sections of the page, outer keys first.

        Raises:
            SystemExit: a key has no description.
        """
        lines: list[str] = []
        waiting: list[tuple[str, str, dict[str, Any]]] = [("", f"`{self.file}`", self.root)]
        while waiting:
            path, title, schema = waiting.pop(0)
            lines += [f"({self.target(path)})=", f"## {title}", ""]
            if schema is not self.root and (about := schema.get("description")):
                lines += [markdown(about), ""]
            required = schema.get("required", [])
            inner: list[tuple[str, str, dict[str, Any]]] = []
            for key, property_ in schema.get("properties", {}).items():
                kind = self.kind(property_, f"{path}.{key}" if path else key, inner)
                default = default_of(property_, required=key in required)
                about = property_.get("description", "")
                if not about:
                    self.undescribed.append(f"{path}.{key}" if path else key)
                lines += [f"`{key}`", f": {kind}{default}. {sentence_of(about)}".rstrip(), ""]
            waiting = inner + waiting
        if self.undescribed:
            raise SystemExit(f"reference: {self.file}: keys without a description: {', '.join(self.undescribed)}")
        return lines

    def target(self, path: str) -> str:
        """Return the label of the section of ``path``."""
        return f"{self.file.partition('.')[0]}-{re.sub(r'[^a-z0-9]+', '-', path.lower()).strip('-') or 'file'}"

    def kind(self, schema: dict[str, Any], path: str, inner: list[tuple[str, str, dict[str, Any]]]) -> str:
        """Return the type of a value as text; mappings that are not described yet are added to ``inner``."""
        if "$ref" in schema:
            name = str(schema["$ref"]).rpartition("/")[2]
            definition = self.definitions[name]
            if definition.get("type") != "object":
                return self.kind(definition, path, inner)
            if name not in self.described:
                self.described[name] = path
                inner.append((path, f"`{path}`", definition))
            return f"mapping, see [`{self.described[name]}`](#{self.target(self.described[name])})"
        if "const" in schema:
            return f"`{schema['const']}`"
        if "enum" in schema:
            return " or ".join(f"`{value}`" for value in schema["enum"])
        branches = [b for b in (*schema.get("anyOf", ()), *schema.get("oneOf", ())) if b.get("type") != "null"]
        if branches:
            return self.choice(branches, path, inner)
        if schema.get("type") == "array":
            return f"list of {plural(self.kind(schema.get('items', {}), f'{path}[]', inner))}"
        values = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
        if schema.get("type") == "object" and isinstance(values[0], dict):
            return f"mapping of names to {plural(self.kind(values[0], f'{path}.NAME', inner))}"
        words = {"integer": "integer", "number": "number", "string": "text", "boolean": "`true` or `false`"}
        return words.get(str(schema.get("type")), "value")

    def choice(self, branches: list[dict[str, Any]], path: str, inner: list[tuple[str, str, dict[str, Any]]]) -> str:
        """Return the type of a value with several possible types; each mapping gets a section."""
        found = []
        for branch in branches:
            name = str(branch.get("$ref", "")).rpartition("/")[2]
            form = self.definitions.get(name, {}).get("properties", {}).get("format", {})
            if len(branches) > 1 and "const" in form:
                place = f"{path} {form['const']}"
                if name not in self.described:
                    self.described[name] = place
                    inner.append((place, f"`{path}`, `format: {form['const']}`", self.definitions[name]))
                found.append(f"[`format: {form['const']}`](#{self.target(self.described[name])})")
            else:
                found.append(self.kind(branch, path, inner))
        prefix = "mapping with " if found and found[0].startswith("[`format") else ""
        return prefix + " or ".join(dict.fromkeys(found))


def plural(kind: str) -> str:
    if kind == "text or integer or `true` or `false`":
        return "texts, integers, `true` or `false`"
    for one, many in (("mapping", "mappings"), ("text", "texts"), ("integer", "integers"), ("number", "numbers")):
        if kind == one or kind.startswith((f"{one},", f"{one} ")):
            return many + kind.removeprefix(one)
    return kind


def markdown(docstring: str) -> str:
    """Return a docstring as Markdown: code in single backticks."""
    return " ".join(docstring.split()).replace("``", "`")


def sentence_of(text: str) -> str:
    """Return a description as a sentence: with a capital letter, unless it begins with code, and a full stop."""
    text = markdown(text)
    if not text:
        return ""
    text = text if text.startswith(("`", "HOST", "mqtt://")) else text[0].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def default_of(schema: dict[str, Any], *, required: bool) -> str:
    if required:
        return ", required"
    value = schema.get("default")
    if value is None or value in ({}, [], "") or isinstance(value, dict):
        return ""
    return f", default `{str(value).lower() if isinstance(value, bool) else value}`"


def example(file: str) -> list[str]:
    """Return a complete commented example, which the tests load."""
    return ["```yaml", (EXAMPLES / file).read_text(encoding="utf-8").rstrip(), "```", ""]


def program(file: str, *topics: str) -> list[str]:
    """Return a complete commented program, and the commands that it needs; the tests of the pages run them."""
    lines = ["<!-- test: background -->", "```console", "$ penstock up", "```", ""]
    if topics:
        lines += ["```console"]
        for topic in topics:
            lines += [f"$ penstock tube topic create {topic}", "..."]
        lines += ["```", ""]
    return [*lines, "```python", (EXAMPLES / file).read_text(encoding="utf-8").rstrip(), "```", ""]


def configuration() -> str:
    lines = ["# Configuration", "", NOTE, ""]
    lines += [
        (
            "`penstock up` reads `penstock.yaml` in the working directory, or the file that `--config` names. "
            "Precedence: command line option, environment variable, file, default. Relative paths in the file are "
            "relative to the file."
        ),
        "",
        *example("penstock.yaml"),
        (
            "`${VAR}` and `${VAR:-default}` are replaced by environment variables, `${file:PATH}` by the first line of "
            "a file, for secrets. A listener can be written as its address: `mqtt: 127.0.0.1:1883`."
        ),
        "",
        "SIGHUP reloads users, tokens, policies, certificates and `mqtt.limits`. Other changes need a restart.",
        "",
        "## Options and environment variables",
        "",
        "| option | environment variable | key |",
        "| --- | --- | --- |",
    ]
    lines += [f"| `--{o.flag}` | `{o.variable}` | `{'.'.join(o.location)}` |" for o in node.OPTIONS]
    return "\n".join([*lines, "", *Keys(node.NodeConfig, "penstock.yaml").sections()])


def pipeline_file() -> str:
    lines = ["# Pipeline file", "", NOTE, ""]
    lines += [
        "A pipeline is one YAML file. `penstock pipeline validate FILE` checks it without Spark. A complete example:",
        "",
        *example("pipeline.yaml"),
        (
            "`${VAR}` and `${VAR:-default}` are replaced by environment variables, `${file:PATH}` by the first line of "
            "a file, for secrets, which no message shows. Paths of these files, of schemas and of Python files are "
            "relative to the pipeline file. Paths of tables, and of files that executors read, are relative to the "
            "working directory."
        ),
        "",
        (
            "Durations have Spark's form, a number and a unit (`500 milliseconds`, `10 minutes`, `1 day`), because "
            "Spark parses the same text. Options of commands have the short form (`10m`)."
        ),
        "",
        (
            "The addresses `statestore.broker` and `master` of a source come from the file. If the file has none, the "
            "environment variables `PENSTOCK_BROKER` and `PENSTOCK_TUBE_MASTER` are used, then the defaults "
            "`mqtt://127.0.0.1:1883` and `127.0.0.1:8715`. The file has precedence because the pipeline belongs to the "
            "state store that has its lease. To let the environment override an address, write "
            "`${PENSTOCK_BROKER:-mqtt://HOST:1883}`. With `pipeline submit --deploy-mode cluster`, pass variables with "
            "`--env`."
        ),
        "",
    ]
    return "\n".join([*lines, *Keys(Pipeline, "pipeline.yaml").sections()])


SOURCES = {
    "node": "Node",
    "disk": "Disk space",
    "mqtt": "MQTT broker",
    "mqtt_storage": "Storage of MQTT sessions and retained messages",
    "mqtt_listener": "MQTT listeners, with the label `listener`",
    "listener": "Certificates of the HTTP and TubeMQ listeners, with the label `listener`",
    "audit": "Audit trail",
    "access": "Users, policies and certificates",
    "statestore": "State store",
    "statestore_denied": "Denied commands of the state store, with the label `verb`",
    "tube": "TubeMQ broker",
    "group": "Consumer groups, with the label `group`: the 200 with the largest lag",
    "cluster": "Cluster",
    "etcd": "Members of etcd of a cluster, with the label `endpoint`",
    "rule": "Rules, with the labels `filter` and `topic`",
    "tracing": "Traces",
    "span": "Durations of spans, with the label `span`",
    "commit": "Durations of commits, with the label `part`: `statestore`, `mqtt`, `tube` or `master`",
    "telemetry": "Metrics and log lines over OTLP",
    "capture": "Change capture, with the label `topic`",
    "bridge": "Bridges, with the label `bridge`",
}


def metrics() -> str:
    from penstock.node.metric_help import METRICS

    lines = ["# Metrics", "", NOTE, ""]
    lines += [
        (
            "`/metrics` of a node ([HTTP](http.md)) returns these metrics in the Prometheus text format, or in that of "
            "OpenMetrics to clients that accept it, as Prometheus does. Counters start at 0 with the process. "
            "[Operate pipelines](../operations/pipelines.md) has those of pipelines."
        ),
        "",
    ]
    lines += [METRICS_EXAMPLE]
    for source, entries in METRICS.items():
        lines += [f"## {SOURCES[source]}", "", "| metric | type | meaning |", "| --- | --- | --- |"]
        for attribute, metric in entries.items():
            names = "<br>".join(f"`penstock_{source}_{metric.name or attribute}{end}`" for end in metric.suffixes)
            lines.append(f"| {names} | {metric.type} | {cell(metric.text)} |")
        lines.append("")
    return "\n".join(lines)


def record_table() -> str:
    lines = ["# Record format", "", NOTE, ""]
    lines += [
        (
            "A record has a value and attributes. The body of the TubeMQ message is the value, unchanged. Other fields "
            "are attributes with percent-encoded values, because TubeMQ's attributes cannot contain `,`, `=` or "
            "spaces. Rules, producers, the Spark formats and the command line use the same format. A complete example:"
        ),
        "",
        *program("record.py", "readings"),
        "## Fields",
        "",
        "| field | attribute | type | meaning |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| `{f.name}` | `{f.attribute}` | `{cell(f.type)}` | {cell(f.meaning)} |" for f in record.FIELDS]
    lines += [
        "",
        (
            "In Spark, `key` and `value` are as above, `timestamp` is the append time, and "
            "`headers` are the decoded attributes: those of this table, then the user properties by their names."
        ),
        "",
    ]
    return "\n".join(lines)


def option_table(title: str, options: Mapping[str, str], unsupported: Mapping[str, str]) -> list[str]:
    lines = [f"## {title}", "", "| option | meaning | default |", "| --- | --- | --- |"]
    for name, text in options.items():
        # The default is last, in parentheses.
        meaning, _, default = text.removesuffix(")").rpartition(" (")
        lines.append(f"| `{name}` | {cell(meaning)} | {cell(default)} |")
    lines += ["", "Not supported, with alternatives:", "", "| option | instead |", "| --- | --- |"]
    return [*lines, *(f"| `{name}` | {cell(instead)} |" for name, instead in unsupported.items()), ""]


def spark_options() -> str:
    # Its program starts a session: tests/spark/test_formats_page.py runs it in that of the suite.
    lines = ["# Spark format options", "", NOTE, "", "<!-- test: nightly -->", ""]
    lines += [
        (
            "Names and keyword values are not case-sensitive. Numbers are positive integers; times without a unit are "
            "in ms. An unknown option or an invalid value is an error when Spark loads the source or starts to write, "
            "before it reads or writes a record. The error has the option, the value and the accepted values; for an "
            "unknown option, the nearest known name. A complete example with all formats:"
        ),
        "",
        *program("spark_formats.py", "readings"),
    ]
    lines += option_table("`tubemq`, reading", spark.READ_OPTIONS, spark.UNSUPPORTED)
    lines += option_table("`tubemq`, writing", spark.WRITE_OPTIONS, spark.UNSUPPORTED_IN_SINK)
    lines += option_table("`aio-statestore`, reading", store.READ_OPTIONS, store.UNSUPPORTED)
    lines += option_table("`aio-statestore`, writing", store.WRITE_OPTIONS, store.UNSUPPORTED)
    lines += option_table("`mqtt`, reading", mqtt_spark.READ_OPTIONS, mqtt_spark.UNSUPPORTED)
    lines += option_table("`mqtt`, writing", mqtt_spark.WRITE_OPTIONS, mqtt_spark.UNSUPPORTED)
    return "\n".join(lines)


VERSION = Hlc(1696374425000, 1, "StateStore")
DIALECT_ROWS: dict[str, Callable[[dialects.Dialect], str]] = {
    "response if a condition is not met": lambda d: f"`{d.condition_not_met.decode().strip()}`",
    "delete and expiry event": lambda d: f"`{d.delete_event.decode()}`",
    "error of a lower fencing token": lambda d: "… " + " ".join(d.fence_lower.split()[5:9]) + " …",
    "format of versions": lambda d: f"`{(VERSION.padded() if d.padded_versions else str(VERSION))}`",
    "`__stat`, `__protVer`; other major versions are refused with 505": lambda d: "yes" if d.status else "no",
    "version in the response and notification of a delete": lambda d: (
        "of the delete" if d.delete_version else "of the deleted value"
    ),
    "properties of time stamp and fencing token": lambda d: f"`{d.timestamp_property}`, `{d.fence_property}`",
}


def state_store() -> str:
    from penstock.node import capture
    from tools import statestore_commands

    notes = (ROOT / "tools" / "state-store.md").read_text(encoding="utf-8").split("<!-- next -->")
    command_notes, error_order, request_rules, extension_notes, version_notes = (note.strip() for note in notes)
    lines = ["# State store protocol", "", NOTE, ""]
    lines += [
        (
            "A command is a request over MQTT 5. Applications use a [client library](../state-store/clients.md); a "
            "complete example without one:"
        ),
        "",
        *program("state_store.py"),
        "## Commands",
        "",
    ]
    lines += ["| command | syntax | access | description | available |", "| --- | --- | --- | --- | --- |"]
    for spec in commands.COMMANDS.values():
        offered = statestore_commands.OFFERED[spec.extension]
        access = statestore_commands.permissions(spec)
        page = f"[{spec.verb}](state-store/{spec.verb.lower()}.md)"
        lines.append(f"| {page} | `{cell(spec.syntax)}` | {access} | {cell(spec.summary)} | {offered} |")
    lines += ["", command_notes, "", "## Protocol forms", ""]
    lines += [
        (
            "The request determines the form of its response: with `__protVer` it is the form of the Azure IoT "
            "Operations SDKs, on the older topic the older form, otherwise the published form. All forms can be used "
            "at the same time; `statestore.dialect` forces one."
        ),
        "",
        "| | " + " | ".join(dialects.DIALECTS) + " |",
        "| --- |" + " --- |" * len(dialects.DIALECTS),
    ]
    for title, show in DIALECT_ROWS.items():
        lines.append(f"| {title} | " + " | ".join(show(dialect) for dialect in dialects.DIALECTS.values()) + " |")
    lines += [
        "",
        "## Errors",
        "",
        "The text after `-ERR `. If several errors apply, the first in the order below is returned:",
        "",
    ]
    lines += [f"* `{error}`" for error in StoreError]
    lines += ["", error_order, "", request_rules, "", extension_notes, ""]
    lines += [*statestore_commands.extension_table(), "", version_notes, "", "## Change capture", ""]
    lines += [
        (
            "With `statestore.capture_topic` the node writes every change as one record to partition "
            f"{capture.CAPTURE_PARTITION} of that TubeMQ topic, exactly once and in version order:"
        ),
        "",
        "| attribute | meaning |",
        "| --- | --- |",
    ]
    rows = [line for line in (capture.__doc__ or "").splitlines() if line.startswith("``")]
    lines += [f"| {' | '.join(part.replace('``', '`') for part in row.split(None, 1))} |" for row in rows]
    lines += [
        "",
        (
            "If TubeMQ accepts no records (no space, a failed disk), the store continues: changes wait in its log on "
            f"disk, up to {capture.MAX_WAITING_BYTES >> 20} MiB of them also in memory. `/readyz` then reports the "
            "delay and the reason in `warnings`. `penstock_capture_waiting_changes` is the number of waiting changes, "
            "`penstock_capture_oldest_age_seconds` the age of the oldest one."
        ),
    ]
    lines += ["", "```{toctree}", ":hidden:"]
    lines += [f"{spec.verb} <state-store/{spec.verb.lower()}>" for spec in commands.COMMANDS.values()]
    return "\n".join([*lines, "```", ""])


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
    "metrics.md": metrics,
    "mqtt-conformance.md": mqtt_conformance,
    "mqtt-differences.md": mqtt_differences,
    "record.md": record_table,
    "spark-options.md": spark_options,
    "state-store.md": state_store,
    "tubemq-compatibility.md": tubemq,
}


LISTS = ("features.md", "../security/authorization.md")
"""Hand-written pages with a generated list of state store commands."""
_LIST = re.compile(r"(<!-- commands: (\w+) -->).*?(<!-- /commands -->)", re.DOTALL)


def with_command_lists(page: str) -> str:
    """Return the page with its lists of state store commands generated from the table of commands."""
    from tools import statestore_commands

    lists = statestore_commands.command_lists()
    text = (PAGES / page).read_text(encoding="utf-8")
    return _LIST.sub(lambda found: f"{found[1]}{lists[found[2]]}{found[3]}", text)


def generated() -> dict[str, Callable[[], str]]:
    """Return the file name of each page and the function that returns its text."""
    sys.path.insert(0, str(ROOT))  # sys.path has the directory of the script, but not its parent
    from benchmarks.tables import result_pages
    from tools import statestore_commands

    lists = {page: partial(with_command_lists, page) for page in LISTS}
    # A path in another folder replaces PAGES when main() joins them.
    results = {str(path): partial(str, text) for path, text in result_pages().items()}
    return GENERATED | lists | results | statestore_commands.pages(NOTE)


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
        print(f"docs/reference: {', '.join(differing)}: out of date", file=sys.stderr)
        print("  hint: run `make reference` and commit the pages", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
