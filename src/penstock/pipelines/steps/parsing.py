"""Parse payloads into columns: the parse step, and the JSON of looked-up values.

A payload that does not match the schema exactly becomes a dead letter with a code. Spark's parsers are lenient in ways
that would change data silently (they use the first of two values, and the last of two equal names).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.errors import ConfigError, shortened
from penstock.payloads.avro import AvroMessages
from penstock.payloads.confluent import AFTER_ID
from penstock.payloads.errors import (
    CODES,
    MISMATCH,
    NEW_FIELD,
    NEW_FIELDS,
    NO_BIRTH,
    OTHER_SCHEMA,
    RANGE,
    UNKNOWN_ENUM,
    UNKNOWN_METRIC,
)
from penstock.payloads.protobuf import ProtobufMessages
from penstock.pipelines.rows import ALIVE, alive, data_columns, internal_columns, mark_dead, references, refuse_internal
from penstock.pipelines.spec.steps import Parse
from penstock.pipelines.steps.arrow_functions import arrow_function, arrow_schema
from penstock.pipelines.steps.expectations import add_checks
from penstock.pipelines.steps.expressions import literal, quoted
from penstock.pipelines.steps.payloads import DECODERS, WITH_HEADERS, MessageDecoder, PayloadDecoder, SchemaDecoder
from penstock.pipelines.steps.registry import RegistryMessages
from penstock.pipelines.steps.sparkplug import SparkplugDecoder
from penstock.spark.files.object_storage import StoragePath

__all__ = ["from_json", "is_one_value_without_jar", "nullable_columns", "parse_step", "schema_of"]

JSON_OPTIONS = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": "_corrupt",
    # NaN and Infinity are not JSON.
    "allowNonNumericNumbers": "false",
}

_STRICT_JSON = "penstock_strict_json"
_CATALOG = "penstock_functions"
_FUNCTIONS = "penstock.spark.Functions"
_EXACT_TYPES = (
    *(BooleanType, ByteType, ShortType, IntegerType, LongType),
    *(FloatType, DoubleType, DateType, TimestampType),
)
_END = secrets.token_hex(8)
"""See ``is_one_value_without_jar``."""


def parse_step(rows: DataFrame, name: str, parse: Parse, births: Sequence[StoragePath] = ()) -> DataFrame:
    """Add the columns of the payload to ``rows``. ``births``: see ``graph.build_stream``."""
    schema = schema_of(name, parse.ddl)
    taken = sorted(set(schema.names) & set(data_columns(rows)))
    if taken:
        raise ConfigError(f"step {name!r} creates a column {taken[0]!r} that its input has", hint="rename the column")
    if parse.format == "raw":
        return _raw(rows, name, schema)
    value = sf.col("_source.value")
    if parse.format in DECODERS or parse.has_own_schema or parse.format == "sparkplug":
        result = _sparkplug(schema, births) if parse.format == "sparkplug" else _decoded(schema, parse)
        decoded = rows.withColumn("_decoded", result)
        found = sf.col("_decoded")
        failures = [(code, sf.when(found["code"] == code, found["reason"])) for code in CODES]
        return _columns(decoded.withColumn("_parsed", found["value"]), rows, name, parse, schema, failures)
    given, of_registry = rows, list[tuple[str, Column]]()
    if parse.registry is not None:
        given, of_registry = _after_id(rows, parse)
        value = sf.col(_PAYLOAD)
    text = value.cast("string")
    parsed, failures = (
        _csv(text, schema, parse) if parse.format == "csv" else _json(value, text, schema, parse, rows.sparkSession)
    )
    failures = [
        *of_registry,
        (
            "parse.empty",
            sf.when(value.isNull() | (sf.trim(text, sf.lit(" \t\r\n")) == ""), sf.lit("the payload is empty")),
        ),
        ("parse.not_utf8", sf.when(~sf.is_valid_utf8(text), sf.lit("the payload is not UTF-8"))),
        *failures,
    ]
    exact = _exact_of(value, schema, parse, rows.sparkSession) if parse.format == "json" else None
    if exact is None:
        return _columns(given.withColumn("_parsed", parsed), rows, name, parse, schema, failures)
    made = given.withColumn("_exact", exact).withColumn("_parsed", sf.coalesce("_exact", parsed))
    return _columns(made, rows, name, parse, schema, failures, valid=sf.col("_exact").isNotNull())


def _after_id(rows: DataFrame, parse: Parse) -> tuple[DataFrame, list[tuple[str, Column]]]:
    """Return ``rows`` with the payload after the id of its schema in a registry, and the failures of those without one
    or with that of another schema."""
    messages = RegistryMessages.of(parse)

    def check(payloads: Any) -> Any:
        return messages.failures(payloads)

    kind = StructType([StructField("code", StringType()), StructField("reason", StringType())])
    value, found = sf.col("_source.value"), sf.col("_registered")
    registered = arrow_function(check, kind)(sf.when(alive(), value))
    after = sf.when(found["code"].isNull(), sf.expr(f"substring(_source.value, {AFTER_ID + 1})"))
    failures = [(code, sf.when(found["code"] == code, found["reason"])) for code in CODES]
    return rows.withColumn("_registered", registered).withColumn(_PAYLOAD, after), failures


def _columns(
    parsed: DataFrame,
    rows: DataFrame,
    name: str,
    parse: Parse,
    schema: StructType,
    failures: list[tuple[str, Column]],
    valid: Column | None = None,
) -> DataFrame:
    """Return ``rows`` with the columns of ``parsed._parsed``; rows with a failure, or a null that is not allowed, are
    dead. ``valid``: rows that are known to have no failure."""
    failures = [
        *failures,
        *(
            (
                "schema.null",
                sf.expr(
                    f"CASE WHEN _parsed.{quoted(f.name)} IS NULL "
                    f"THEN {literal(f'column {f.name!r} is missing or null')} END"
                ),
            )
            for f in schema.fields
            if not f.nullable
        ),
    ]
    if parse.allow_empty:
        is_empty = sf.coalesce(sf.octet_length("_source.value") == 0, sf.lit(True))
        valid = is_empty if valid is None else is_empty | valid
        # A format may have a value without bytes, such as an Avro record of nulls.
        parsed = parsed.withColumn("_parsed", sf.when(~is_empty, sf.col("_parsed")))
    marked = mark_dead(parsed, name, failures, valid)
    if parse.policies:
        is_mine = sf.coalesce(sf.col("_dead.step") == name, sf.lit(False))
        changed = [sf.when(_is_changed(parse, each.name), sf.lit(f"{name}.{each.name}")) for each in parse.policies]
        marked = add_checks(marked, alive() | is_mine, name, changed)
    kept = map(quoted, [*internal_columns(marked), *data_columns(rows)])
    return marked.selectExpr(
        *kept, *(f"CASE WHEN {ALIVE} THEN _parsed.{quoted(column)} END AS {quoted(column)}" for column in schema.names)
    )


def _is_changed(parse: Parse, policy: str) -> Column:
    """Return True for a row to which the ``policy`` for changes of the schema applies."""
    if policy == "new_fields" and parse.new_fields_as is not None:
        return alive() & sf.col("_parsed")[parse.new_fields_as].isNotNull()
    return sf.col("_dead.code").isin(*_CODES[policy])


_CODES = {
    "new_fields": (NEW_FIELD,),
    "changed_types": (MISMATCH, RANGE, OTHER_SCHEMA),
    "unknown_enums": (UNKNOWN_ENUM,),
    "unknown_metrics": (NO_BIRTH, UNKNOWN_METRIC),
}
"""Codes of the dead letters of a policy for changes of the schema."""


def _decoded(schema: StructType, parse: Parse) -> Column:
    """Return a struct for a payload: ``value`` with the columns of ``schema``, or ``code`` and ``reason``."""
    nullable = nullable_columns(schema)
    decoder: PayloadDecoder | MessageDecoder
    if parse.has_own_schema:
        decoder = MessageDecoder(_messages(parse), arrow_schema(nullable))
    else:
        decoder = PayloadDecoder(parse.format, arrow_schema(nullable), parse.new_fields, parse.new_fields_as)
    kind = _result_of(nullable)

    def decode(payloads: Any) -> Any:
        return decoder(payloads)

    def decode_with_headers(payloads: Any, headers: Any) -> Any:
        assert isinstance(decoder, PayloadDecoder)
        return decoder(payloads, headers)

    value = sf.when(alive(), sf.col("_source.value"))
    if parse.format not in WITH_HEADERS:
        return arrow_function(decode, kind)(value)
    return arrow_function(decode_with_headers, kind)(value, sf.when(alive(), sf.col("_source.headers")))


def nullable_columns(schema: StructType) -> StructType:
    """Return ``schema`` without NOT NULL, also in structs, where ``from_json`` ignores it as well.

    Spark trusts the type of what a Python function returns: a null in a field that has none fails the batch.
    """
    return schema.toNullable()


def _result_of(columns: StructType) -> StructType:
    """Return the type of the result of a decoder."""
    return StructType(
        [StructField("value", columns), StructField("code", StringType()), StructField("reason", StringType())]
    )


def _sparkplug(schema: StructType, births: Sequence[StoragePath]) -> Column:
    """Like ``_decoded``, for messages of Sparkplug, which need the offset of their record."""
    assert births, "a stream with Sparkplug messages has a directory for births"
    decoder = SparkplugDecoder(tuple(births), arrow_schema(nullable_columns(schema)))

    def decode(payloads: Any, topics: Any, partitions: Any, offsets: Any, redriven: Any) -> Any:
        return decoder(payloads, topics, partitions, offsets, redriven)

    topics = sf.filter("_source.headers", lambda each: each["key"] == sf.lit("mqtt.topic"))
    place = [sf.col(f"_source.{field}").cast("string") for field in ("source", "topic", "broker", "partition")]
    return arrow_function(decode, _result_of(nullable_columns(schema)))(
        sf.col("_source.value"),
        sf.try_element_at(topics, sf.lit(1))["value"],
        sf.concat_ws("/", *place),
        sf.when(alive(), sf.col("_source.offset")),
        sf.col("_redrive").isNotNull(),
    )


def _messages(parse: Parse) -> SchemaDecoder:
    encoding = parse.encoding or "plain"
    if parse.registry is not None:
        return RegistryMessages.of(parse)
    if parse.format == "avro":
        return AvroMessages(parse.message_schema.decode(), encoding, parse.schema_id)
    return ProtobufMessages(
        parse.message_schema,
        parse.message or "",
        encoding,
        parse.schema_id,
        parse.new_fields,
        parse.new_fields_as,
        parse.unknown_enums,
    )


def from_json(text: Column, schema: StructType) -> Column:
    """Parse ``text`` into a struct of ``schema`` and ``_corrupt``, not null if it does not match the schema."""
    return sf.from_json(text, StructType([*schema.fields]).add("_corrupt", StringType()), JSON_OPTIONS)


def schema_of(step: str, ddl: str) -> StructType:
    """Parse ``ddl`` with Spark.

    Raises:
        ConfigError: it is not a list of columns, or uses a reserved name.
    """
    try:
        schema = StructType.fromDDL(ddl)
    except ParseException as error:
        raise ConfigError(
            f"step {step!r}: {ddl!r} is not a list of columns",
            option="schema",
            why=(error.getMessage() or str(error)).split("\n\n")[0].strip(),
            hint="write name TYPE [NOT NULL], ... as in CREATE TABLE",
        ) from error
    if not isinstance(schema, StructType):
        raise ConfigError(f"step {step!r}: {ddl!r} is one type, not a list of columns", option="schema")
    refuse_internal(step, schema.names)
    return schema


def _missing(column: str) -> Column:
    return sf.lit(f"column {column!r} is missing or null")


def _json(
    value: Column, text: Column, columns: StructType, parse: Parse, spark: SparkSession
) -> tuple[Column, list[tuple[str, Column]]]:
    schema = _schema_of_payload(columns, parse)
    parsed = from_json(text, schema)
    new = sf.map_filter(sf.from_json(text, "MAP<STRING, STRING>"), lambda name, _: ~name.isin(*schema.names))
    too_new: list[tuple[str, Column]] = []
    if parse.new_fields_as is not None:
        parsed = parsed.withField(quoted(parse.new_fields_as), _bound(new, lambda found: _unless_empty(found, found)))
    elif parse.new_fields != "ignore":
        # As errors of other formats are shortened.
        reason = _bound(new, lambda found: _unless_empty(found, sf.substring(_names_of(found), 1, 200)))
        too_new = [(NEW_FIELD, reason)]
    return parsed, [
        ("parse.not_json", sf.when(~_is_one_value(value, text, spark), sf.lit("the payload is not JSON"))),
        (
            "schema.mismatch",
            _mismatch(
                schema,
                f"from_json({_TEXT if parse.registry is None else _TEXT_AFTER_ID}, 'MAP<STRING, STRING>')",
                f"CASE WHEN {_TEXTS} IS NULL THEN 'the payload is not a JSON object' END",
                lambda name: f"try_element_at({_TEXTS}, {literal(name)})",
            ),
        ),
        *(
            (
                "schema.range",
                sf.when(_is_infinite(place), sf.lit(f"column {'.'.join(place)!r} is too large for its type")),
            )
            for field in schema.fields
            for place in _floats((field.name,), field.dataType)
        ),
        *too_new,
    ]


def _bound(value: Column, use: Callable[[Column], Column]) -> Column:
    """Return ``use`` of ``value``, which is computed once."""
    return sf.transform(sf.array(value), use)[0]


def _unless_empty(found: Column, value: Column) -> Column:
    """Return ``value``, or null if the map ``found`` is empty."""
    return sf.when(sf.size(found) > 0, value)


def _names_of(found: Column) -> Column:
    return sf.concat(sf.lit(NEW_FIELDS), sf.array_join(sf.map_keys(found), ", "))


def _exact_of(value: Column, columns: StructType, parse: Parse, spark: SparkSession) -> Column | None:
    """Return ``value`` parsed by ``_exact_json`` to the type of ``_json``; null for a payload with new fields, unless
    they are ignored."""
    exact = _exact_json(value, _schema_of_payload(columns, parse), spark, is_closed=parse.new_fields != "ignore")
    if exact is None or parse.new_fields_as is None:
        return exact
    return exact.withField(quoted(parse.new_fields_as), sf.lit(None).cast("map<string, string>"))


def _schema_of_payload(columns: StructType, parse: Parse) -> StructType:
    return StructType([field for field in columns.fields if field.name != parse.new_fields_as])


def _exact_json(value: Column, schema: StructType, spark: SparkSession, *, is_closed: bool = False) -> Column | None:
    """Return ``value`` parsed by a function of penstock's jar (``spark/jvm/ExactJson.java``); null for each text that
    may be invalid, and with ``is_closed`` for an object with a name that ``schema`` lacks. None if the session lacks
    this function or parses times by the rules of Spark 2, or the function does not support a type of ``schema``.
    """
    is_supported = all(map(_is_exact, schema.fields)) and len(set(schema.names)) == len(schema.names)
    is_legacy = (spark.conf.get("spark.sql.legacy.timeParserPolicy") or "").upper() == "LEGACY"
    if not is_supported or is_legacy or not _has_functions(spark):
        return None
    is_utc = spark.conf.get("spark.sql.session.timeZone") == "UTC"
    fields = StructType([*schema.fields, StructField("_corrupt", StringType())])
    function = quoted(f"exact_json{'_utc' if is_utc else ''}{'_closed' if is_closed else ''}:{fields.json()}")
    return sf.call_function(f"{_CATALOG}.{function}", value)


def _has_functions(spark: SparkSession) -> bool:
    """Return True if the session has the functions of penstock's jar in ``_CATALOG``, and register this catalog.

    False for an older jar, and if the application has its own catalog of this name.
    """
    setting = f"spark.sql.catalog.{_CATALOG}"
    if spark.conf.get(setting, _FUNCTIONS) != _FUNCTIONS:
        return False
    try:
        # A catalog is loaded when it is used, and then its absence is an error. This looks for the class only.
        spark.udf.registerJavaFunction(_CATALOG, _FUNCTIONS, BooleanType())
    except AnalysisException as error:
        if error.getCondition() != "NO_UDF_INTERFACE":
            return False
    spark.conf.set(setting, _FUNCTIONS)
    return True


def _is_exact(field: StructField) -> bool:
    kind = field.dataType
    if isinstance(kind, ArrayType):
        return _is_exact(StructField("element", kind.elementType))
    if isinstance(kind, StructType):
        return len(set(kind.names)) == len(kind.names) and all(map(_is_exact, kind.fields))
    # A string with a collation has another type.
    return kind == StringType() or isinstance(kind, _EXACT_TYPES)


def _floats(place: tuple[str, ...], kind: DataType) -> list[tuple[str, ...]]:
    """Return the paths of floating point columns and struct fields below ``place``."""
    if isinstance(kind, FloatType | DoubleType):
        return [place]
    if isinstance(kind, StructType):
        return [found for field in kind.fields for found in _floats((*place, field.name), field.dataType)]
    return []


def _is_infinite(place: tuple[str, ...]) -> Column:
    # NaN and Infinity are not JSON, so an infinite number is the result of a number that is too large.
    return sf.expr(f"abs(_parsed.{'.'.join(map(quoted, place))}) = double('Infinity')")


_PAYLOAD = "_payload"
"""Column with the payload after the id of its schema in a registry."""
_TEXT = "CAST(_source.value AS STRING)"
"""The payload as text, in SQL."""
_TEXT_AFTER_ID = f"CAST({_PAYLOAD} AS STRING)"
_TEXTS = "penstock_texts"
"""Name of the variable with the columns of a payload as text, in SQL."""


def _mismatch(schema: StructType, given: str, whole: str, text_of: Callable[[str], str]) -> Column:
    """Return the reason why a payload does not match the schema. Spark sets a column to null if it cannot parse it.

    All arguments are in SQL. ``given`` is the payload with all columns parsed as text, which the others read as
    ``_TEXTS``; ``whole`` is a reason that applies to the whole payload, ``text_of`` returns the text of one column.
    ``given`` is bound in a lambda, so that it is computed once, and only for invalid rows.
    """
    columns = (
        f"CASE WHEN {text_of(field.name)} IS NOT NULL AND _parsed.{quoted(field.name)} IS NULL THEN "
        + literal(f"column {field.name!r} is not {shortened(field.dataType.simpleString().upper())}")
        + " END"
        for field in schema.fields
    )
    reason = f"coalesce({', '.join((whole, *columns))}, 'the payload does not match the schema')"
    return sf.expr(
        f"CASE WHEN _parsed._corrupt IS NOT NULL THEN transform(array({given}), {_TEXTS} -> {reason})[0] END"
    )


def _csv(text: Column, schema: StructType, parse: Parse) -> tuple[Column, list[tuple[str, Column]]]:
    end = "[\\r\\n]+$"
    line = sf.regexp_replace(text, end, "")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "_corrupt", "sep": parse.delimiter or ","}
    # A quote inside quotes is doubled, as in other CSV parsers, but not by default in Spark.
    options["escape"] = '"'
    parsed = sf.from_csv(line, sf.lit(f"{parse.ddl}\n, _corrupt STRING"), options)
    texts = ", ".join(f"{quoted(name)} STRING" for name in schema.names)
    pairs = ", ".join(literal(text) for pair in options.items() for text in pair)
    line_text = f"regexp_replace({_TEXT}, {literal(end)}, '')"
    # Spark reads the first line and drops the others. A line break between quotes belongs to its column.
    beyond = sf.regexp_replace(line, '"[^"]*"', "").rlike("[\\r\\n]")
    return parsed, [
        ("parse.not_csv", sf.when(beyond, sf.lit("the payload is more than one line of CSV"))),
        (
            "schema.mismatch",
            _mismatch(
                schema,
                f"from_csv({line_text}, {literal(f'{texts}, _corrupt STRING')}, map({pairs}))",
                f"CASE WHEN {_TEXTS}._corrupt IS NOT NULL "
                f"THEN 'the line does not have {len(schema.names)} columns' END",
                lambda name: f"{_TEXTS}.{quoted(name)}",
            ),
        ),
    ]


def _raw(rows: DataFrame, name: str, schema: StructType) -> DataFrame:
    """Return the unchanged payload as one column."""
    value, text = sf.col("_source.value"), sf.col("_source.value").cast("string")
    field = schema.fields[0]
    is_text = isinstance(field.dataType, StringType)
    failures: list[tuple[str, Column]] = []
    if not field.nullable:
        failures.append(("schema.null", sf.when(value.isNull(), _missing(field.name))))
    if is_text:
        failures.append(("parse.not_utf8", sf.when(~sf.is_valid_utf8(text), sf.lit("the payload is not UTF-8"))))
    marked = mark_dead(rows, name, failures)
    data = sf.when(alive(), text if is_text else value).alias(field.name)
    return marked.select(*internal_columns(rows), *references(rows), data)


def _is_one_value(value: Column, text: Column, spark: SparkSession) -> Column:
    """Return True for a ``value``, as text ``text``, that is exactly one JSON value with distinct names.

    Spark's parsers stop after the first value, and from_json uses the last of two equal names. The check is a function
    of penstock's jar (``spark/jvm/StrictJson.java``), or, in a session without this jar, an expression that takes three
    times as long.
    """
    if not _has_jar(spark):
        return is_one_value_without_jar(text, spark.version)
    return sf.call_function(_STRICT_JSON, value)


def _has_jar(spark: SparkSession) -> bool:
    """Return True if the session has penstock's jar, and register its function."""
    try:
        spark.udf.registerJavaFunction(_STRICT_JSON, "penstock.spark.StrictJson", BooleanType())
    except AnalysisException:
        return False
    return True


def is_one_value_without_jar(text: Column, version: str) -> Column:
    """Return the same as the function of the jar, by Spark's own functions; ``version`` is Spark's.

    In an array with a second element that no payload can know, this element has another place, or none, if the text is
    not one value; text that ends the array itself, such as ``1], [2``, leaves it out.
    """
    array = sf.try_parse_json(sf.concat(sf.lit("["), text, sf.lit(f',"{_END}"]')))
    # One expression with one occurrence of the array: Spark parses the text once for each occurrence.
    found = sf.coalesce(sf.try_variant_get(array, "$[1]", "string") == sf.lit(_END), sf.lit(False))
    return found & ~_has_half_a_character(text) if version.startswith("4.1.") else found


def _has_half_a_character(text: Column) -> Column:
    """Return True for an escaped unpaired surrogate: Spark 4.1 changes the character, 4.2 rejects it."""
    without_backslashes = sf.replace(text, sf.lit("\\\\"), sf.lit(" "))
    pair = "\\\\u[dD][89abAB][0-9a-fA-F]{2}\\\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    return sf.regexp_replace(without_backslashes, pair, " ").rlike("\\\\u[dD][89a-fA-F]")
