"""Sources and steps of a pipeline as functions of a program."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import sqlglot
from sqlglot.tokenizer_core import TokenType

from penstock.pipelines.export.code import literal_text
from penstock.pipelines.export.program import (
    COORDINATES,
    Function,
    NotExportable,
    Program,
    commented,
    joined,
    refuse_other_options,
)
from penstock.pipelines.rows import filter_pattern, glob_pattern
from penstock.pipelines.spec import sql
from penstock.pipelines.spec.columns import parse_ddl
from penstock.pipelines.spec.pipeline import reads_of
from penstock.pipelines.spec.sources import (
    SOURCE,
    DeltaSource,
    FilesSource,
    KafkaSource,
    MqttSource,
    Source,
    StateStoreSource,
    TubeOptions,
    as_texts,
)
from penstock.pipelines.spec.steps import Enrich, Flatten, Map, Step, Window
from penstock.pipelines.spec.values import MASTER_VARIABLE, Part, duration_ms, quoted_name, template_parts

__all__ = ["Streams"]

_BuildStep = Callable[[Step, list[str], list[str]], list[Function]]


class Streams:
    """The functions of the sources and steps of ``program``, each made when it is first needed."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._steps = {step.name: index for index, step in enumerate(program.pipeline.steps)}
        self.functions: dict[str, list[Function]] = {}
        """Functions by step or source, each after those that it calls; the last one returns the stream."""
        self.internal: dict[str, tuple[str, ...]] = {}
        """Columns of each stream that describe the record."""
        self._reasons: dict[str, str] = {}
        self._builders: Mapping[str, _BuildStep] = {
            "parse": self._parse,
            "explode": self._explode,
            "flatten": self._flatten,
            "sql": self._sql,
            "map": self._map,
            "python": self._python,
            "filter": self._filter,
            "expect": self._expect,
            "enrich": self._enrich,
            "dedupe": self._dedupe,
            "window": self._window,
            "concat": self._concat,
        }

    def stream(self, name: str) -> str:
        """Return a call of the function of the step or source ``name``.

        Raises:
            NotExportable: it cannot be exported.
        """
        if name in self._reasons:
            raise NotExportable(self._reasons[name])
        if name not in self.functions:
            try:
                index = self._steps.get(name)
                made = self._source(name) if index is None else self._step(index)
            except NotExportable as error:
                self._reasons[name] = str(error)
                raise
            # After the functions that it calls.
            self.functions[name] = made
        return f"{self.functions[name][-1].name}()"

    def _step(self, index: int) -> list[Function]:
        step = self._program.pipeline.steps[index]
        build = self._builders.get(step.kind)
        if step.join is not None:
            raise NotExportable(
                f"step {step.name} joins two streams; programs would lose its unmatched and late rows silently"
            )
        if build is None:
            raise NotExportable(f"step {step.name} is a {step.kind} step, which programs cannot have")
        inputs = list(reads_of(self._program.pipeline, index))
        part = getattr(step, step.kind)
        if step.enrich is not None and step.enrich.as_of is not None:
            raise NotExportable(
                f"step {step.name} joins with the values that keys had at the time of the row (as_of); Spark has "
                "no as-of join of streams"
            )
        if step.parse is not None and step.parse.allow_empty:
            raise NotExportable(
                f"step {step.name} accepts records without a payload (allow_empty), which are dead letters in programs"
            )
        if isinstance(part, Part):
            refuse_other_options(f"step {step.name}", part, _STEP_OPTIONS[step.kind])
        calls = [self.stream(each) for each in inputs]
        self.internal[step.name] = self.internal[inputs[0]]
        return build(step, inputs, calls)

    def _source(self, name: str) -> list[Function]:
        source = self._program.pipeline.inputs[name]
        place: tuple[str, ...] = (SOURCE,) if self._program.pipeline.source is not None else ("sources", name)
        if isinstance(source, DeltaSource):
            raise NotExportable(f"source {name} reads a change data feed; a program reads it with delta-spark")
        refuse_other_options(f"source {name}", source, _SOURCE_OPTIONS)
        shown = "" if name == SOURCE else name
        made = self._program.function(
            "read", shown or "source", f"Read the records of the source {shown}.".replace(" .", ".")
        )
        self.internal[name] = ("_record",)
        if isinstance(source, TubeOptions):
            self._tube(made, source, name, place)
        elif isinstance(source, FilesSource):
            self._files(made, source, place)
        elif isinstance(source, KafkaSource):
            raise NotExportable(f"source {name} reads Kafka; use Spark's own connector in a program")
        elif source.rows is None:
            made.add(
                f'rows = spark.readStream.format("rate").option("rowsPerSecond", {source.rows_per_second}).load()',
                'value = sf.to_json(sf.struct("value", "timestamp")).cast("binary")',
                'record = sf.struct(sf.col("value").cast("string").alias("id"), "timestamp", value.alias("value"))',
                'return rows.select(record.alias("_record"))',
            )
        else:
            raise NotExportable(f"source {name} generates a number of records, for tests")
        return [made]

    def _tube(self, made: Function, source: TubeOptions, name: str, place: tuple[str, ...]) -> None:
        options = source.all_options()
        texts = {key: literal_text(value) for key, value in options.items()}
        given = as_texts(source.options)
        for key, value in given.items():
            texts[key] = self._program.given((*place, "options", key), value)
        has_master = self._program.at((*place, "master")) is not None
        texts["tubemq.master"] = (
            self._program.given((*place, "master"), source.master)
            if has_master
            else f'os.environ.get("{MASTER_VARIABLE}", "127.0.0.1:8715")'
        )
        topics = source.tube_topics()
        if isinstance(source, MqttSource | StateStoreSource):
            texts["subscribe"] = self._program.given((*place, "tube_topic"), topics[0])
        elif len(topics) == 1:
            texts["subscribe"] = self._program.given((*place, "topics", 0), topics[0])
        texts["includeHeaders"] = '"true"'
        chain = "".join(f".option({literal_text(key)}, {value})" for key, value in sorted(texts.items()))
        prefix = "" if name == SOURCE else f'sf.lit("{name}/"), '
        self._program.helper("header")
        self._program.helper("valid_text")
        made.add(
            f'rows = spark.readStream.format("tubemq"){chain}.load()',
            f'place = sf.concat_ws("", {prefix}"topic", sf.lit("/"), sf.col("broker").cast("string"), sf.lit(":"), '
            'sf.col("partition").cast("string"), sf.lit("@"), sf.col("offset").cast("string"))',
            'record = sf.struct(sf.coalesce(valid_text(header("id")), place).alias("id"), '
            + ", ".join(f'"{each}"' for each in (*COORDINATES, "key", "value", "headers"))
            + ")",
        )
        if isinstance(source, MqttSource):
            made.add(
                'rows = rows.select(record.alias("_record"), header("mqtt.topic").alias("mqtt_topic"))',
            )
            if source.topic_filter == "#":
                made.add('return rows.where(~sf.startswith("mqtt_topic", sf.lit("$")))')
            else:
                pattern = literal_text(filter_pattern(source.topic_filter))
                made.add(f'return rows.where(sf.col("mqtt_topic").rlike({pattern}))')
        elif isinstance(source, StateStoreSource):
            made.add(
                'key = valid_text(sf.col("key").cast("string"))',
                'rows = rows.select(record.alias("_record"), key.alias("state_key"), '
                'header("operation").alias("operation"), header("version").alias("version"), '
                'sf.nullif(header("writer"), sf.lit("")).alias("writer"), '
                'sf.timestamp_millis(header("expires-at").cast("bigint")).alias("expires_at"))',
                'key = sf.col("_record.key").cast("string")',
                f"rows = rows.where(key.rlike({literal_text(glob_pattern(source.keys))}))",
                "return rows" if source.deletes else "return rows.where(\"operation = 'SET'\")",
            )
        else:
            made.add('return rows.select(record.alias("_record"))')

    def _files(self, made: Function, source: FilesSource, place: tuple[str, ...]) -> None:
        if source.content not in ("lines", "whole"):
            raise NotExportable(
                f"a source with content {source.content} makes JSON of each row; read the table with Spark instead"
            )
        path = self._program.given((*place, "path"), source.path)
        is_whole = source.content == "whole" or source.skip_lines > 0
        option = '.option("wholetext", "true")' if is_whole else ""
        made.add(
            f'rows = spark.readStream.format("text"){option}.option("maxFilesPerTrigger", {source.max_files})'
            f".load({path})"
        )
        if source.content == "lines" and is_whole:
            made.lines.append("    # The lines of a file have no order, unless it is read as a whole.")
            made.add(
                'lines = sf.posexplode(sf.split("value", "\\r?\\n"))',
                f'rows = rows.select(sf.col("_metadata.file_path").alias("file"), lines.alias("_line", "value"))'
                f".where(\"_line >= {source.skip_lines} AND value != ''\")",
                'record = sf.struct(sf.concat_ws("@", "file", sf.col("_line").cast("string")).alias("id"), '
                'sf.col("value").cast("binary").alias("value"))',
                'return rows.select(record.alias("_record"), "file")',
            )
            return
        made.add(
            'rows = rows.select(sf.col("_metadata.file_path").alias("file"), "value")',
            'value = sf.col("value").cast("binary").alias("value")',
            'record = sf.struct(sf.lit(None).cast("string").alias("id"), value)',
            'return rows.select(record.alias("_record"), "file")',
        )

    def _checked(self, step: Step, text: str) -> Function:
        """Return a function for the rows of a step with their `_reason`; live rows have none."""
        made = self._program.function("checked", step.name, f"{text}; `_reason` says why a row is rejected.")
        self._program.rejecting[step.name] = made.name
        return made

    def _accepted(self, step: Step, checked: Function, *others: str) -> list[Function]:
        """Return ``checked``, and the function of its rows without a reason; ``others``: more columns to drop."""
        made = self._program.function("step", step.name, f"Step {step.name}: the rows that it does not reject.")
        dropped = ", ".join(f'"{each}"' for each in ("_reason", *others))
        made.add(f'return {checked.name}().where("_reason IS NULL").drop({dropped})')
        return [checked, made]

    def _parse(self, step: Step, _inputs: list[str], calls: list[str]) -> list[Function]:
        parse = step.parse
        assert parse is not None
        if parse.format not in ("json", "csv", "raw"):
            raise NotExportable(
                f"step {step.name} parses {parse.format}, which penstock decodes; for Avro and Protobuf, Spark has "
                "the packages spark-avro and spark-protobuf"
            )
        if parse.registry is not None:
            raise NotExportable(f"step {step.name} reads schemas of a registry")
        if parse.policies or parse.new_fields_as is not None:
            raise NotExportable(f"step {step.name} has a policy for changes of the schema")
        columns = parse_ddl(parse.ddl)
        required = [column.name for column in columns if not column.nullable]
        made = self._checked(step, f"Step {step.name}: parse the payload ({parse.format.upper()})")
        if parse.format == "raw":
            return self._raw_payload(step, made, calls[0], columns[0].name, columns[0].type, required)
        made.add(f"rows = {calls[0]}", 'text = sf.col("_record.value").cast("string")')
        ddl = ", ".join(f"{quoted_name(column.name)} {column.type}" for column in columns) + ", _corrupt STRING"
        is_empty = r'text.isNull() | (sf.trim(text, sf.lit(" \t\r\n")) == "")'
        reasons = [
            f'sf.when({is_empty}, sf.lit("the payload is empty"))',
            'sf.when(~sf.is_valid_utf8(text), sf.lit("the payload is not UTF-8"))',
        ]
        options = '"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "_corrupt"'
        if parse.format == "json":
            self._program.helper("is_one_json_value")
            reasons.append('sf.when(~is_one_json_value(text), sf.lit("the payload is not JSON"))')
            parser = f'sf.from_json(text, {literal_text(ddl)}, {{{options}, "allowNonNumericNumbers": "false"}})'
        else:
            made.add('line = sf.regexp_replace(text, "[\\\\r\\\\n]+$", "")')
            separator = literal_text(parse.delimiter or ",")
            parser = f'sf.from_csv(line, {literal_text(ddl)}, {{{options}, "sep": {separator}, "escape": "\\""}})'
            reasons.append(
                'sf.when(sf.regexp_replace(line, \'"[^"]*"\', "").rlike("[\\\\r\\\\n]"), '
                'sf.lit("the payload is more than one line of CSV"))'
            )
        made.add(f'rows = rows.withColumn("_parsed", {parser})')
        reasons.append(
            'sf.when(sf.col("_parsed._corrupt").isNotNull(), sf.lit("the payload does not match the schema"))'
        )
        if parse.format == "json":
            for column in columns:
                if column.type in ("FLOAT", "DOUBLE", "REAL"):
                    where = f"abs(_parsed.{quoted_name(column.name)}) = double('Infinity')"
                    reasons.append(f"sf.when(sf.expr({literal_text(where)}), {_reason(column.name, 'is too large')})")
        reasons += [
            f"sf.when(sf.col({literal_text('_parsed.' + quoted_name(name))}).isNull(), "
            f"{_reason(name, 'is missing or null')})"
            for name in required
        ]
        made.add(
            f'rows = rows.withColumn("_reason", sf.coalesce({", ".join(reasons)}))',
            'return rows.select("*", "_parsed.*").drop("_parsed", "_corrupt")',
        )
        return self._accepted(step, made)

    def _raw_payload(
        self, step: Step, made: Function, call: str, name: str, kind: str, required: Sequence[str]
    ) -> list[Function]:
        value = 'sf.col("_record.value")' + ('.cast("string")' if kind == "STRING" else "")
        made.add(f"rows = {call}.withColumn({literal_text(name)}, {value})")
        reasons = []
        if required:
            reasons.append(
                f"sf.when(sf.col({literal_text(quoted_name(name))}).isNull(), {_reason(name, 'is missing or null')})"
            )
        if kind == "STRING":
            reasons.append(
                f'sf.when(~sf.is_valid_utf8({literal_text(quoted_name(name))}), sf.lit("the payload is not UTF-8"))'
            )
        reason = f"sf.coalesce({', '.join(reasons)})" if reasons else 'sf.lit(None).cast("string")'
        made.add(f'return rows.withColumn("_reason", {reason})')
        return self._accepted(step, made)

    def _sql(self, step: Step, inputs: list[str], calls: list[str]) -> list[Function]:
        assert step.sql is not None
        expressions, relations = _projections(step.name, step.sql)
        stars = {"*", *(f"{name}.*" for name in relations)}
        has_star = any(each in stars or each.startswith("* ") for each in expressions)
        kept = [] if has_star else [literal_text(name) for name in self.internal[step.name]]
        made = self._program.function("step", step.name, f"Step {step.name}: compute columns.")
        alias = max(relations, key=len, default=inputs[0]) if inputs[0] not in relations else inputs[0]
        arguments = ", ".join([*kept, *(literal_text(joined(each)) for each in expressions)])
        made.add(f"return {calls[0]}.alias({literal_text(alias)}).selectExpr({arguments})")
        return [made]

    def _map(self, step: Step, _inputs: list[str], calls: list[str]) -> list[Function]:
        given = step.map
        assert given is not None
        made = self._program.function("step", step.name, f"Step {step.name}: rename, compute and drop columns.")
        made.add(f"rows = {calls[0]}")
        for old, new in given.rename.items():
            column, *rest = old.split(".")
            if rest:
                place = ".".join([*rest[:-1], quoted_name(new)])
                value = f"sf.col({literal_text(column)}).withField({literal_text(place)}, sf.col({literal_text(old)}))"
                if new.lower() != rest[-1].lower():
                    value += f".dropFields({literal_text('.'.join(rest))})"
                made.add(f"rows = rows.withColumn({literal_text(column)}, {value})")
        made.add(*_renames({old: new for old, new in given.rename.items() if "." not in old}))
        computed = _computed(given)
        if computed:
            columns = ", ".join(f"{literal_text(name)}: {value}" for name, value in computed.items())
            made.add(f"rows = rows.withColumns({{{columns}}})")
        for path in given.drop:
            column, _, inner = path.partition(".")
            if not inner:
                made.add(f"rows = rows.drop({literal_text(column)})")
            else:
                value = f"sf.col({literal_text(column)}).dropFields({literal_text(inner)})"
                made.add(f"rows = rows.withColumn({literal_text(column)}, {value})")
        made.add("return rows")
        return [made]

    def _python(self, step: Step, _inputs: list[str], calls: list[str]) -> list[Function]:
        given = step.python
        assert given is not None
        path = Path(given.file)
        if self._program.is_declarative:
            raise NotExportable(f"step {step.name} calls Python, which a declarative project cannot ship to executors")
        if not path.stem.isidentifier():
            raise NotExportable(f"step {step.name}: {given.file} cannot be imported under this name")
        self._program.python_files[path.name] = given.code
        self._program.imports.add(f"from {path.stem} import {given.function}")
        self._program.helper("with_columns_of")
        columns = parse_ddl(given.columns)
        ddl = ", ".join(f"{quoted_name(column.name)} {column.type}" for column in columns)
        chosen = "None" if given.input is None else f"[{', '.join(map(literal_text, given.input))}]"
        made = self._program.function("step", step.name, f"Step {step.name}: columns of a Python function.")
        made.add(f"rows = with_columns_of({calls[0]}, {given.function}, {literal_text(ddl)}, {chosen})")
        required = [f"{quoted_name(column.name)} IS NOT NULL" for column in columns if not column.nullable]
        made.add(f"return rows.where({literal_text(' AND '.join(required))})" if required else "return rows")
        return [made]

    def _filter(self, step: Step, _inputs: list[str], calls: list[str]) -> list[Function]:
        assert step.filter is not None
        made = self._program.function("step", step.name, f"Step {step.name}: the rows for which a condition is true.")
        made.add(f"return {calls[0]}.where({literal_text(joined(step.filter))})")
        return [made]

    def _expect(self, step: Step, _inputs: list[str], calls: list[str]) -> list[Function]:
        expectations = step.expect or []
        made = self._checked(step, f"Step {step.name}: expectations")
        made.add(f"rows = {calls[0]}")
        outcome = []
        for each in expectations:
            if each.threshold is not None:
                share = f"its threshold of {each.threshold:g} needs the counts of a batch, and is not checked"
                made.lines += [f"    {line}" for line in commented(f"Expectation {each.name}: {share}.")]
            if each.on_violation == "keep" or (each.on_violation == "fail" and each.threshold is not None):
                kept = f"Expectation {each.name} keeps rows, and does not count them: {joined(each.expression)}"
                made.lines += [f"    {line}" for line in commented(kept)]
                continue
            violated = f"~sf.coalesce(sf.expr({literal_text(joined(each.expression))}), sf.lit(False))"
            said = literal_text(f"expectation {each.name!r} is violated: {joined(each.expression)}")
            reason = {
                "dead_letter": f"sf.lit({said})",
                "drop": 'sf.lit("dropped")',
                "fail": f"sf.raise_error(sf.lit({said}))",
            }[each.on_violation]
            outcome.append(f"sf.when({violated}, {reason})")
        reason = f"sf.coalesce({', '.join(outcome)})" if outcome else 'sf.lit(None).cast("string")'
        made.add(f'rows = rows.withColumn("_reason", {reason})', "return rows")
        return self._accepted(step, made)

    def _explode(self, step: Step, _inputs: list[str], calls: list[str]) -> list[Function]:
        given = step.explode
        assert given is not None
        functions = []
        call = calls[0]
        if given.empty == "dead_letter":
            checked = self._checked(step, f"Step {step.name}: arrays without elements")
            empty = f"sf.coalesce(sf.size({literal_text(quoted_name(given.column))}), sf.lit(0)) <= sf.lit(0)"
            said = literal_text(f"column {given.column!r} has no elements")
            checked.add(f'return {call}.withColumn("_reason", sf.when({empty}, sf.lit({said})))')
            functions, call = [checked], f'{checked.name}().where("_reason IS NULL").drop("_reason")'
        made = self._program.function("step", step.name, f"Step {step.name}: a row for each element of {given.column}.")
        function = "posexplode_outer" if given.empty == "keep" else "posexplode"
        internal = self.internal[step.name]
        column = literal_text(quoted_name(given.column))
        made.add(
            f'rows = {call}.select("*", sf.{function}({column}).alias("_at", "_element"))',
        )
        before = 'sf.col("_part"), ' if "_part" in internal else ""
        part = f'sf.concat_ws(".", {before}sf.lit({literal_text(step.name)}), sf.col("_at").cast("string"))'
        if given.empty == "keep":
            outer = 'sf.col("_part")' if "_part" in internal else 'sf.lit(None).cast("string")'
            part = f'sf.when(sf.col("_at").isNotNull(), {part}).otherwise({outer})'
        made.add(f'rows = rows.withColumn("_part", {part}).drop({literal_text(given.column)})')
        if given.position is not None:
            made.add(f'rows = rows.withColumn({literal_text(given.position)}, sf.col("_at"))')
        made.add(f'return rows.withColumnRenamed("_element", {literal_text(given.element)}).drop("_at")')
        self.internal[step.name] = tuple(dict.fromkeys((*internal, "_part")))
        return [*functions, made]

    def _flatten(self, step: Step, _inputs: list[str], calls: list[str]) -> list[Function]:
        given: Flatten | None = step.flatten
        assert given is not None
        self._program.helper("flattened")
        made = self._program.function("step", step.name, f"Step {step.name}: fields of structs as columns.")
        columns = "None" if given.columns is None else f"[{', '.join(map(literal_text, given.columns))}]"
        made.add(f"return flattened({calls[0]}, {columns}, {literal_text(given.separator)}, prefix={given.prefix})")
        return [made]

    def _enrich(self, step: Step, inputs: list[str], calls: list[str]) -> list[Function]:
        given: Enrich | None = step.enrich
        assert given is not None
        if given.match:
            raise NotExportable(
                f"step {step.name} looks up a dataset (match); write it to a table, and join that table"
            )
        if given.unavailable != "fail":
            raise NotExportable(f"step {step.name} continues without the state store (unavailable)")
        self._program.helper("state_store_keys")
        key = self._program.template(inputs[0], given.key)
        schema = ", ".join(f"{quoted_name(each.name)} {each.type}" for each in parse_ddl(given.columns))
        pattern = "".join(
            "*" if part.column else re.sub(r"([*?\[])", r"[\1]", part.text) for part in template_parts(given.key)
        )
        into = literal_text(given.into)
        made = self._checked(step, f"Step {step.name}: look up keys of the state store")
        options = '{"columnNameOfCorruptRecord": "_corrupt", "allowNonNumericNumbers": "false"}'
        made.add(
            f"rows = {calls[0]}",
            f"keys = state_store_keys({literal_text(pattern)}).select("
            'sf.col("key").cast("string").alias("_key"), sf.col("value").cast("string").alias("_value"))',
            f'rows = rows.join(sf.broadcast(keys), {key} == sf.col("_key"), "left")',
            f'rows = rows.withColumn("_json", sf.from_json("_value", {literal_text(schema + ", _corrupt STRING")}, '
            f"{options}))",
        )
        reasons = ['sf.when(sf.col("_json._corrupt").isNotNull(), sf.lit("the value of the key is not JSON"))']
        missing = 'sf.when(sf.col("_value").isNull(), {})'
        said = literal_text(f"the state store has no key {given.key}")
        if given.missing == "dead_letter":
            reasons.append(missing.format(f"sf.lit({said})"))
        elif given.missing == "fail":
            reasons.append(missing.format(f"sf.raise_error(sf.lit({said}))"))
        made.add(
            f'rows = rows.withColumn("_reason", sf.coalesce({", ".join(reasons)}))',
            'found = sf.when(sf.col("_json").isNotNull(), sf.col("_json").dropFields("_corrupt"))',
            f'return rows.withColumn({into}, found).drop("_key", "_value", "_json")',
        )
        return self._accepted(step, made)

    def _dedupe(self, step: Step, inputs: list[str], calls: list[str]) -> list[Function]:
        given = step.dedupe
        assert given is not None
        made = self._program.function("step", step.name, f"Step {step.name}: drop duplicates.")
        sources = self._sources_of(inputs[0])
        if given.on == "arrival" and not all(isinstance(each, TubeOptions) for each in sources):
            raise NotExportable(f"step {step.name} compares append times, which files do not have")
        part = ', "_part"' if "_part" in self.internal[step.name] else ""
        row_id = f'sf.concat_ws("#", "_record.id"{part})'
        if given.key == "id":
            key = row_id
        else:
            column = f'sf.col({self._program.column(inputs[0], given.key)}).cast("string")'
            key = f'sf.coalesce(sf.concat(sf.lit("key:"), {column}), sf.concat(sf.lit("id:"), {row_id}))'
        made.add(f'rows = {calls[0]}.withColumn("_copy_of", {key})')
        if given.on == "arrival":
            made.add(
                'rows = rows.withColumn("_arrived", sf.col("_record.timestamp"))'
                f'.withWatermark("_arrived", {literal_text(given.within or "")})'
            )
        else:
            window = self._window_after(step.name)
            time = self._program.column(inputs[0], window.time)
            self._keep_timely(made, window, time)
            made.add(f"rows = rows.withWatermark({time}, {literal_text(window.watermark)})")
        made.add('return rows.dropDuplicatesWithinWatermark(["_copy_of"]).drop("_copy_of", "_arrived")')
        return [made]

    def _sources_of(self, name: str) -> list[Source]:
        index = self._steps.get(name)
        if index is None:
            return [self._program.pipeline.inputs[name]]
        return [found for each in reads_of(self._program.pipeline, index) for found in self._sources_of(each)]

    def _window_after(self, name: str) -> Window:
        """Return the window that reads the step ``name``, directly or through other steps."""
        reached = {name}
        for index, step in enumerate(self._program.pipeline.steps):
            if reached.intersection(reads_of(self._program.pipeline, index)):
                reached.add(step.name)
                if step.window is not None:
                    return step.window
        raise NotExportable(f"step {name} precedes no window")

    @staticmethod
    def _keep_timely(made: Function, window: Window, time: str, *, has_times: bool = True) -> None:
        """Leave out rows whose event time, Python for the column ``time``, is null, or too far after they arrived, if
        sources report this."""
        made.add(f"rows = rows.where(sf.col({time}).isNotNull())")
        if has_times:
            made.lines.append("    # An event far in the future would make all others late.")
            made.add(
                'arrived = sf.coalesce(sf.col("_record.timestamp"), sf.current_timestamp())',
                f"latest = sf.unix_millis(arrived) + sf.lit({duration_ms(window.max_ahead)})",
                f"rows = rows.where(sf.unix_millis({time}) <= latest)",
            )

    def _window(self, step: Step, inputs: list[str], calls: list[str]) -> list[Function]:
        given = step.window
        assert given is not None
        made = self._program.function("step", step.name, f"Step {step.name}: aggregates in windows of event time.")
        has_times = all(isinstance(each, TubeOptions) for each in self._sources_of(inputs[0]))
        dedupes = [each.dedupe.on for each in self._steps_to(inputs[0]) if each.dedupe is not None]
        made.add(f"rows = {calls[0]}")
        time = self._program.column(inputs[0], given.time)
        if "event" not in dedupes:
            self._keep_timely(made, given, time, has_times=has_times)
        if not dedupes:
            made.add(f"rows = rows.withWatermark({time}, {literal_text(given.watermark)})")
        if given.gap is not None:
            made.add(f"window = sf.session_window({time}, {literal_text(given.gap)})")
        else:
            slide = "" if given.slide is None else f", {literal_text(given.slide)}"
            made.add(f"window = sf.window({time}, {literal_text(given.duration)}{slide})")
        groups = {name: self._program.column(inputs[0], name) for name in given.by}
        aggregates = ", ".join(
            f"sf.expr({literal_text(joined(text))}).alias({literal_text(name)})"
            for name, text in given.aggregates.items()
        )
        group = ", ".join(['window.alias("window")', *groups.values()])
        made.add(f"rows = rows.groupBy({group}).agg({aggregates})")
        # A group by a field of a struct has the name of the field.
        by = ", ".join(
            literal_text(name.rpartition(".")[2]) if text == literal_text(name) else text
            for name, text in groups.items()
        )
        parts = 'sf.unix_millis("window.start").cast("string"), sf.unix_millis("window.end").cast("string")'
        if by:
            self._program.helper("json_text")
            parts += f", sf.left(sf.sha2(json_text({by}), 256), sf.lit(32))"
        made.add(f'window_id = sf.concat_ws("-", {parts})')
        columns = ", ".join(
            ['sf.col("window.start").alias("window_start")', 'sf.col("window.end").alias("window_end")']
            + ([by] if by else [])
            + [literal_text(name) for name in given.aggregates]
        )
        made.add(f'return rows.select({columns}, window_id.alias("_id"))')
        self.internal[step.name] = ("_id",)
        return [made]

    def _steps_to(self, name: str) -> list[Step]:
        index = self._steps.get(name)
        if index is None:
            return []
        found = [each for read in reads_of(self._program.pipeline, index) for each in self._steps_to(read)]
        return [*found, self._program.pipeline.steps[index]]

    def _concat(self, step: Step, inputs: list[str], calls: list[str]) -> list[Function]:
        made = self._program.function("step", step.name, f"Step {step.name}: rows of several streams, matched by name.")
        internal: dict[str, None] = {}
        for number, (name, call) in enumerate(zip(inputs, calls, strict=True)):
            before = '"_path", ' if "_path" in self.internal[name] else ""
            path = f'sf.concat_ws("+", {before}sf.lit({literal_text(name)}))'
            rows = f'{call}.withColumn("_path", {path})'
            made.add(f"rows = {rows}" if not number else f"rows = rows.unionByName({rows}, allowMissingColumns=True)")
            internal |= dict.fromkeys(self.internal[name])
        made.add("return rows")
        self.internal[step.name] = (*internal, *(() if "_path" in internal else ("_path",)))
        return [made]


_STEP_OPTIONS: Mapping[str, frozenset[str]] = {
    "parse": frozenset(("format", "columns", "schema_file", "delimiter", "message", "encoding", "schema_id")),
    "explode": frozenset(("column", "into", "position", "empty")),
    "flatten": frozenset(("columns", "separator", "prefix")),
    "map": frozenset(("rename", "compute", "drop")),
    "python": frozenset(("file", "function", "input", "columns", "on_error")),
    "enrich": frozenset(("key", "match", "into", "columns", "missing", "unavailable", "wait", "refresh")),
    "dedupe": frozenset(("key", "on", "within")),
    "window": frozenset(("time", "duration", "slide", "gap", "watermark", "max_ahead", "by", "aggregates", "emit")),
}
"""Options of steps that programs have, or whose values are refused with a reason of their own."""
_SOURCE_OPTIONS = frozenset(
    (
        *("format", "master", "options", "topics", "tube_topic", "topic_filter", "keys", "deletes"),
        *("path", "content", "changes", "skip_lines", "max_files", "rows_per_second", "rows"),
    )
)


def _projections(step: str, statement_: str) -> tuple[list[str], frozenset[str]]:
    """Split ``SELECT a, b FROM c`` into its expressions, and the names that may qualify their columns.

    Raises:
        NotExportable: the statement does more, or cannot be split.
    """
    found = sql.parse_statement(statement_)
    tokens = sqlglot.tokenize(statement_, read="spark")
    if found is None or len(tokens) < 2 or tokens[1].token_type == TokenType.DISTINCT:
        raise NotExportable(f"the statement of step {step} computes more than columns")
    depth, start, parts = 0, tokens[0].end + 1, []
    for before, token in pairwise(tokens):
        if token.token_type in (TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.L_BRACE):
            depth += 1
        elif token.token_type in (TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.R_BRACE):
            depth -= 1
        is_end = token.token_type == TokenType.FROM and before.token_type != TokenType.DISTINCT
        if depth == 0 and (is_end or token.token_type == TokenType.COMMA):
            parts.append(statement_[start : token.start].strip())
            start = token.end + 1
            if is_end:
                break
    if len(parts) != len(found.columns):
        raise NotExportable(f"the statement of step {step} cannot be split into its expressions")
    return parts, frozenset(name for name in found.relations if name)


def _renames(names: Mapping[str, str]) -> list[str]:
    """Return statements that rename the columns ``names`` of ``rows``; columns that get the names of others in turn get
    temporary ones first."""
    before = {old.lower() for old in names}
    passes: list[Mapping[str, str]] = [names]
    if any(new.lower() in before - {old.lower()} for old, new in names.items()):
        first = {old: f"_renamed_{place}" for place, old in enumerate(names)}
        passes = [first, dict(zip(first.values(), names.values(), strict=True))]
    return [
        f"rows = rows.withColumnRenamed({literal_text(old)}, {literal_text(new)})"
        for renamed in passes
        for old, new in renamed.items()
    ]


def _computed(given: Map) -> dict[str, str]:
    """Return the columns that a map step computes, with Python for their values."""
    made: dict[str, str] = {}
    for path, text in given.compute.items():
        column, _, rest = path.partition(".")
        value = f"sf.expr({literal_text(joined(text))})"
        if rest:
            before = made.get(column, f"sf.col({literal_text(column)})")
            value = f"{before}.withField({literal_text(rest)}, {value})"
        made[column] = value
    return made


def _reason(column: str, text: str) -> str:
    return f"sf.lit({literal_text(f'column {column!r} {text}')})"
