"""Sinks of a pipeline as queries of a program, or as datasets and flows of a declarative project."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.pipelines.export.code import literal_text, statement
from penstock.pipelines.export.program import (
    COORDINATES,
    Function,
    NotExportable,
    Program,
    identifier,
    joined,
    refuse_other_options,
)
from penstock.pipelines.export.streams import Streams
from penstock.pipelines.spec.pipeline import SinkPlan, sink_reads
from penstock.pipelines.spec.sinks import FilesSink, MqttSink, Sink, TableSink
from penstock.pipelines.spec.sources import (
    SOURCE,
    TubeOptions,
    as_texts,
)
from penstock.pipelines.spec.values import MASTER_VARIABLE, late_of, quoted_name

__all__ = ["Sinks"]

_BuildSink = Callable[[Sink, SinkPlan, str, str], Function]


class Sinks:
    """The functions of the sinks of ``program``."""

    def __init__(self, program: Program, streams: Streams) -> None:
        self._program = program
        self._streams = streams
        self._builders: Mapping[str, _BuildSink] = {
            "table": self._table,
            "statestore": self._keys,
            "tubemq": self._messages,
            "mqtt": self._messages,
            "files": self._files,
            "console": self._console,
        }

    def sink(self, sink: Sink, sink_plan: SinkPlan | None) -> Function:
        """Return the function that writes the stream of ``sink``.

        Raises:
            NotExportable: the sink, or one of its options, has no equivalent without penstock.
        """
        if late_of(sink.source or "") is not None or sink_plan is None:
            raise NotExportable("Spark drops late records of a window, so there are no rows for it")
        if sink.postgresql is not None:
            raise NotExportable(
                "it writes each batch and its number to PostgreSQL in one transaction; write its rows with Spark's "
                "format jdbc in foreachBatch"
            )
        if sink.kafka is not None:
            raise NotExportable(
                "it writes each batch and its number to Kafka in one transaction; write its rows with Spark's format "
                "kafka, which is at least once"
            )
        build = self._builders.get(sink.kind)
        if build is None:
            raise NotExportable(f"it is a {sink.kind} sink, which programs cannot have")
        if sink.table is not None and sink.table.delete_when is not None:
            raise NotExportable("it deletes rows of the table (delete_when), which programs cannot do")
        refuse_other_options("it", getattr(sink, sink.kind), _SINK_OPTIONS[sink.kind])
        reads = sink_reads(self._program.pipeline, sink)
        call = self._streams.stream(reads)
        return build(sink, sink_plan, call, reads)

    def _query(self, sink: Sink, text: str) -> Function:
        if self._program.is_declarative:
            return self._program.function("flow", sink.name, text)
        made = self._program.function("write", sink.name, text)
        made.result = "StreamingQuery"
        return made

    def _started(self, made: Function, sink_name: str, mode: str, target: str, writer: str = "") -> None:
        """Add the start of the query of ``rows``; ``target``: argument of start."""
        made.add(
            f"return rows.writeStream.queryName({literal_text(sink_name)}){target}.outputMode({literal_text(mode)})"
            f'{writer}.option("checkpointLocation", f"{{CHECKPOINTS}}/{sink_name}").trigger(**TRIGGER).start()'
        )

    def _table(self, sink: Sink, found: SinkPlan, call: str, reads: str) -> Function:
        internal = self._streams.internal[reads]
        table = sink.table
        assert table is not None
        table_format = self._program.table_format or table.format
        if self._program.is_declarative and table.mode == "append" and table_format == "delta":
            raise NotExportable("a project has Parquet tables only; export it with --table-format parquet")
        made = self._query(sink, f"Sink {sink.name}: a {'Delta' if table_format == 'delta' else 'Parquet'} table.")
        made.add(f"rows = {call}")
        columns = {}
        for part in table.partitions:
            column = "_record.timestamp" if part.is_coordinate else quoted_name(part.column)
            match part.transform:
                case "day":
                    columns[part.name] = f"CAST({column} AS DATE)"
                case "hour":
                    columns[part.name] = f"date_format({column}, 'yyyy-MM-dd-HH')"
                case "bucket":
                    columns[part.name] = f"pmod(hash({column}), {part.buckets})"
        if columns:
            inner = ", ".join(f"{literal_text(name)}: sf.expr({literal_text(text)})" for name, text in columns.items())
            made.add(f"rows = rows.withColumns({{{inner}}})")
        columns_of_record: tuple[str, ...] = ()
        if "_record" in internal:
            columns_of_record = ("_id",)
            fields = ("id", *COORDINATES) if self._program.has_coordinates(found) else ("id",)
            inner = ", ".join(f'"_{name}": sf.col("_record.{name}")' for name in fields)
            dropped = ", ".join(f'"{name}"' for name in internal if name in ("_record", "_path"))
            made.add(f"rows = rows.withColumns({{{inner}}}).drop({dropped})")
        names = [literal_text(part.name) for part in table.partitions]
        if table.mode == "merge":
            identity = [name for name in ("_id", "_part") if name in (*internal, *columns_of_record)]
            self._merge(made, sink.name, table, table_format, found, reads, identity)
            return made
        if found.changes_windows:
            raise NotExportable("it receives windows whenever they change, which a table without keys cannot replace")
        if self._program.is_declarative:
            partitions = f", partition_cols=[{', '.join(names)}]" if names else ""
            named = f"name={literal_text(identifier(sink.name))}, format={literal_text(table_format)}"
            made.decorators = statement(f"dp.table({named}{partitions})", 0)
            made.decorators[0] = f"@{made.decorators[0]}"
            made.add("return rows")
            return made
        writer = f".partitionBy({', '.join(names)})" if names else ""
        path = f'.option("path", f"{{TABLES}}/{sink.name}")'
        self._started(made, sink.name, "append", f".format({literal_text(table_format)})", path + writer)
        return made

    def _merge(
        self,
        made: Function,
        name: str,
        table: TableSink,
        table_format: str,
        found: SinkPlan,
        reads: str,
        identity: Sequence[str],
    ) -> None:
        """Add a batch function that merges the stream ``reads``.

        ``identity``: columns that order rows whose ``order_by`` is equal.
        """
        if self._program.is_declarative or table_format != "delta":
            raise NotExportable("it merges rows by key, which needs a Delta table and foreachBatch")
        keys = ", ".join(self._program.column(reads, key) for key in table.keys)
        equal = " AND ".join(f"old.{quoted_name(key)} <=> new.{quoted_name(key)}" for key in table.keys)
        made.lines += [
            "",
            "    def merge(batch: DataFrame, _number: int) -> None:",
            f'        """Replace the rows with the same keys: {", ".join(table.keys)}."""',
        ]
        if table.order_by is not None:
            last = f"sf.col({self._program.column(reads, table.order_by)}).desc_nulls_last()"
            order = ", ".join([last, *map(literal_text, identity)])
            made.lines += statement(f"last = Window.partitionBy({keys}).orderBy({order})", 8)
            made.lines += statement(
                'batch = batch.withColumn("_place", sf.row_number().over(last)).where("_place = 1").drop("_place")', 8
            )
        names = ", ".join(literal_text(part.name) for part in table.partitions)
        partitioned = f".partitionBy({names})" if names else ""
        made.lines += [
            f'        target = f"{{TABLES}}/{name}"',
            *statement(f'batch.limit(0).write.format("delta"){partitioned}.mode("ignore").save(target)', 8),
            '        batch.createOrReplaceTempView("new")',
            "        batch.sparkSession.sql(",
            f"            f{literal_text(f'MERGE INTO delta.`{{target}}` AS old USING new ON {equal} ')}",
            '            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"',
            "        )",
            "",
        ]
        mode = "update" if found.changes_windows else "append"
        self._started(made, name, mode, ".foreachBatch(merge)")

    def _files(self, sink: Sink, found: SinkPlan, call: str, reads: str) -> Function:
        files = sink.files
        assert files is not None
        if self._program.is_declarative:
            raise NotExportable("it writes a file for each batch, which needs a query of its own")
        if found.changes_windows:
            raise NotExportable("it receives windows whenever they change, which Spark's files cannot have")
        if files.order_by is not None:
            raise NotExportable("it orders the rows of a file (order_by), which needs foreachBatch")
        made = self._query(sink, f"Sink {sink.name}: files of {files.format.upper()}.")
        made.add(f"rows = {call}")
        if files.columns:
            made.add(f"rows = rows.select({', '.join(self._program.column(reads, name) for name in files.columns)})")
        else:
            self._program.helper("data_columns")
            made.add("rows = rows.select(*data_columns(rows))")
        given = "".join(
            f".option({literal_text(key)}, {literal_text(value)})" for key, value in files.spark_options.items()
        )
        path = f'.option("path", f"{{TABLES}}/{sink.name}")'
        self._started(made, sink.name, "append", f".format({literal_text(files.format)})", given + path)
        return made

    def _keys(self, sink: Sink, found: SinkPlan, call: str, reads: str) -> Function:
        target = sink.statestore
        assert target is not None
        if self._program.is_declarative:
            raise NotExportable("it writes keys in the order of a batch, which needs foreachBatch")
        broker = self._program.broker()
        fencing = '{"fencingToken": os.environ["FENCING_TOKEN"]}'
        self._program.constants["FENCED"] = f'{fencing} if "FENCING_TOKEN" in os.environ else {{}}'
        made = self._query(sink, f"Sink {sink.name}: keys of the state store.")
        made.add(f"rows = {call}")
        changes = []
        for entry in target.entries:
            value = self._program.json_of(reads, entry.value)
            if entry.when != "true":
                value = f"sf.when(sf.expr({literal_text(joined(entry.when))}), {value})"
            key = self._program.template(reads, entry.key)
            changes.append(f'sf.struct({key}.alias("key"), {value}.alias("value"))')
        order = "sf.lit(None)" if target.order_by is None else f"sf.col({self._program.column(reads, target.order_by)})"
        made.add(
            f"changes = sf.array({', '.join(changes)})",
            f'rows = rows.select({order}.alias("order"), sf.posexplode(changes).alias("entry", "change"))',
        )
        made.lines += [
            "",
            "    def write(batch: DataFrame, _number: int) -> None:",
            '        """Write the last change of each key; without a value the key is deleted."""',
        ]
        made.lines += statement('place = sf.struct("order", sf.monotonically_increasing_id(), "entry")', 8)
        made.lines += statement('changes = batch.select("change.*", place.alias("place")).where("key IS NOT NULL")', 8)
        made.lines += statement(
            'last = changes.groupBy("key").agg(sf.max_by(sf.struct("value"), "place").alias("last"))'
            '.select("key", "last.value")',
            8,
        )
        made.lines += statement(
            f'last.write.format("aio-statestore").mode("append").option("statestore.broker", {broker})'
            ".options(**FENCED).save()",
            8,
        )
        made.lines.append("")
        self._started(made, sink.name, "update" if found.changes_windows else "append", ".foreachBatch(write)")
        return made

    def _messages(self, sink: Sink, found: SinkPlan, call: str, reads: str) -> Function:
        internal = self._streams.internal[reads]
        messages = sink.messages
        assert messages is not None
        if found.changes_windows and self._program.is_declarative:
            raise NotExportable("it receives windows whenever they change")
        if messages.order_by is not None and self._program.is_declarative:
            raise NotExportable("it sends the rows of a batch in an order (order_by), which needs foreachBatch")
        if "_record" in internal and not self._program.has_coordinates(found):
            raise NotExportable("messages need an id, which records of files do not have outside of a pipeline")
        kind = "mqtt" if isinstance(messages, MqttSink) else "tubemq"
        made = self._query(sink, f"Sink {sink.name}: {'MQTT messages' if kind == 'mqtt' else 'records of TubeMQ'}.")
        made.add(f"rows = {call}")
        if messages.when != "true":
            made.add(f"rows = rows.where({literal_text(joined(messages.when))})")
        identity = [literal_text("_record.id" if name == "_record" else name)
                    for name in ("_record", "_id", "_path", "_part") if name in internal]  # fmt: skip
        unique = f"{self._program.pipeline.name}.{sink.name}"
        made.add(f'message = sf.concat_ws("/", {", ".join(identity)}, sf.lit({literal_text(unique)}))')
        is_json = not isinstance(messages.value, str)
        # A number is sent as text, bytes as they are: a cast keeps those that are no text.
        value = (
            f'sf.col({self._program.column(reads, messages.value)}).cast("string").cast("binary")'
            if isinstance(messages.value, str)
            else self._program.json_of(reads, messages.value)
        )
        named = dict(
            messages.properties if isinstance(messages, MqttSink) else sink.tubemq.headers if sink.tubemq else {}
        )
        if kind == "tubemq" and is_json:
            named = {"content-type": "application/json", **named}
        pairs = ['sf.struct(sf.lit("id").alias("key"), message.alias("value"))']
        for name, template in named.items():
            text = self._program.template(reads, template)
            pairs.append(f'sf.struct(sf.lit({literal_text(name)}).alias("key"), {text}.alias("value"))')
        made.add(f'pairs = sf.filter(sf.array({", ".join(pairs)}), lambda pair: pair["value"].isNotNull())')
        topic = self._program.template(reads, messages.topic)
        order = ""
        if messages.order_by is not None:
            order = f'sf.col({self._program.column(reads, messages.order_by)}).alias("_order"), '
        if kind == "tubemq":
            assert sink.tubemq is not None
            key = 'sf.lit(None).cast("string")'
            if sink.tubemq.key is not None:
                key = self._program.template(reads, sink.tubemq.key)
            made.add(
                f'rows = rows.select({order}{topic}.alias("topic"), {key}.alias("key"), '
                f'{value}.alias("value"), '
                'pairs.cast("array<struct<key: string, value: binary>>").alias("headers"))',
            )
            made.add("rows = rows.where(\"trim(topic) != '' AND value IS NOT NULL\")")
        else:
            content = 'sf.lit("application/json")' if is_json else 'sf.lit(None).cast("string")'
            made.add(
                f'rows = rows.select({order}{topic}.alias("topic"), {value}.alias("payload"), '
                f'{content}.alias("content_type"), pairs.alias("properties"))',
                'rows = rows.where(~sf.col("topic").rlike(r"[+#\\x00]") & (sf.col("topic") != ""))'
                '.where("payload IS NOT NULL")',
            )
        size = messages.largest
        if size is not None:
            made.add(f'rows = rows.where("octet_length({"value" if kind == "tubemq" else "payload"}) <= {size}")')
        options = self._message_options(sink)
        if self._program.is_declarative:
            name = identifier(sink.name)
            inner = ", ".join(f"{literal_text(key)}: {text}" for key, text in options.items())
            created = statement(f'dp.create_sink({literal_text(name)}, "{kind}", {{{inner}}})', 0)
            made.decorators = [*created, "", "", f"@dp.append_flow(target={literal_text(name)})"]
            made.add("return rows")
            return made
        chain = "".join(f".option({literal_text(key)}, {text})" for key, text in options.items())
        if not found.changes_windows and not order:
            self._started(made, sink.name, "append", f'.format("{kind}")', chain)
            return made
        made.lines += ["", "    def send(batch: DataFrame, _number: int) -> None:", '        """Send a batch."""']
        if order:
            made.lines += statement('batch = batch.coalesce(1).sortWithinPartitions("_order").drop("_order")', 8)
        made.lines += statement(f'batch.write.format("{kind}").mode("append"){chain}.save()', 8)
        made.lines.append("")
        self._started(made, sink.name, "update" if found.changes_windows else "append", ".foreachBatch(send)")
        return made

    def _message_options(self, sink: Sink) -> dict[str, str]:
        """Return the options of the Spark format, as Python."""
        place = self._program.sink_place(sink)
        if sink.mqtt is not None:
            broker = (
                self._program.broker()
                if sink.mqtt.broker is None
                else self._program.given((*place, "mqtt", "broker"), sink.mqtt.broker)
            )
            return {
                "mqtt.broker": broker,
                "qos": literal_text(str(sink.mqtt.qos)),
                "retain": literal_text(str(sink.mqtt.retain).lower()),
            }
        assert sink.tubemq is not None
        found = self._program.pipeline.tube_options(sink.tubemq)
        made = {key: literal_text(value) for key, value in found.items()}
        for key, value in as_texts(sink.tubemq.options).items():
            made[key] = self._program.given((*place, "tubemq", "options", key), value)
        if sink.tubemq.master is not None:
            made["tubemq.master"] = self._program.given((*place, "tubemq", "master"), sink.tubemq.master)
            return made
        for name, source in self._program.pipeline.inputs.items():
            if isinstance(source, TubeOptions) and source.master == found.get("tubemq.master"):
                start: tuple[str, ...] = (SOURCE,) if self._program.pipeline.source is not None else ("sources", name)
                made["tubemq.master"] = (
                    self._program.given((*start, "master"), source.master)
                    if self._program.at((*start, "master")) is not None
                    else f'os.environ.get("{MASTER_VARIABLE}", "127.0.0.1:8715")'
                )
                if not sink.tubemq.options:
                    for key, value in source.login().items():
                        made[key] = self._program.given((*start, "options", key), value)
                break
        return made

    def _console(self, sink: Sink, found: SinkPlan, call: str, reads: str) -> Function:
        if self._program.is_declarative:
            raise NotExportable("a project has no console")
        assert sink.console is not None
        made = self._query(sink, f"Sink {sink.name}: print the first rows of each batch.")
        dropped = ", ".join(map(literal_text, self._streams.internal[reads]))
        made.add(f"rows = {call}.drop({dropped})")
        mode = "update" if found.changes_windows else "append"
        self._started(made, sink.name, mode, '.format("console")', f'.option("numRows", {sink.console.rows})')
        return made

    def dead_letters(self) -> Function:
        """Return the query of the rejected rows of all steps."""
        sources = self._program.pipeline.inputs.values()
        is_tube = all(isinstance(source, TubeOptions) for source in sources)
        made = self._program.function(
            "flow" if self._program.is_declarative else "write", "dead_letters", "Rows that steps reject."
        )
        fields = [f"_record.{name}" for name in ("id", *(COORDINATES if is_tube else ()), "value")]
        columns = ", ".join(map(literal_text, fields))
        for number, (step, name) in enumerate(self._program.rejecting.items()):
            rows = f"{name}().where(\"_reason IS NOT NULL AND _reason != 'dropped'\")"
            reason = f'sf.lit({literal_text(step)}).alias("step"), sf.col("_reason").alias("reason")'
            selected = f"{rows}.select({reason}, {columns})"
            made.add(f"rows = {selected}" if not number else f"others = {selected}")
            if number:
                made.add("rows = rows.unionByName(others)")
        if self._program.is_declarative:
            made.decorators = ['@dp.table(name="dead_letters", format="parquet")']
            made.add("return rows")
            return made
        table_format = self._program.table_format or "parquet"
        made.result = "StreamingQuery"
        path = '.option("path", f"{TABLES}/dead_letters")'
        self._started(made, "dead_letters", "append", f'.format("{table_format}")', path)
        return made


_MESSAGE_OPTIONS = ("topic", "value", "when", "order_by", "max_bytes")
_SINK_OPTIONS: Mapping[str, frozenset[str]] = {
    "table": frozenset(
        (
            *("format", "path", "endpoint", "region", "mode", "keys", "order_by"),
            *("partition_by", "target_file_size", "maintenance"),
        )
    ),
    "statestore": frozenset(("entries", "order_by", "fence_prefixes")),
    "tubemq": frozenset((*_MESSAGE_OPTIONS, "master", "options", "key", "headers")),
    "mqtt": frozenset((*_MESSAGE_OPTIONS, "broker", "qos", "retain", "properties")),
    "files": frozenset(FilesSink.model_fields),
    "console": frozenset(("rows",)),
}
"""Options of sinks that programs have, or that are not about their rows."""
