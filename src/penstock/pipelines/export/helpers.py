"""Functions that generated programs define if they use them."""

from __future__ import annotations

__all__ = ["HELPERS"]

HELPERS = {
    "header": '''\
def header(name: str) -> Column:
    """Return the text of the first header `name` of a record."""
    found = sf.filter("headers", lambda each: each["key"] == sf.lit(name))
    return sf.try_element_at(found, sf.lit(1))["value"].cast("string")
''',
    "valid_text": '''\
def valid_text(given: Column) -> Column:
    """Return `given`, in hexadecimal if it is not UTF-8 or has a zero byte."""
    is_text = sf.is_valid_utf8(given) & ~given.contains("\\0")
    return sf.when(is_text, given).otherwise(sf.hex(given.cast("binary")))
''',
    "is_one_json_value": '''\
def is_one_json_value(text: Column) -> Column:
    """Return True for a text that is exactly one JSON value with distinct names.

    from_json ignores text after the first value, and uses the last of two equal names.
    """
    array = sf.try_parse_json(sf.concat(sf.lit("["), text, sf.lit(',"end"]')))
    return sf.coalesce(sf.try_variant_get(array, "$[1]", "string") == sf.lit("end"), sf.lit(False))
''',
    "data_columns": '''\
def data_columns(rows: DataFrame) -> list[str]:
    """Return the columns of `rows` without those that describe the source's record, quoted."""
    return [f"`{column}`" for column in rows.columns if not column.startswith("_")]
''',
    "json_text": '''\
def json_text(*columns: str) -> Column:
    """Return columns as a JSON object; its times have milliseconds, or microseconds if one has them."""
    texts = {}
    for digits in ("SSS", "SSS'000'", "SSSSSS"):
        local = f"yyyy-MM-dd'T'HH:mm:ss.{digits}"
        options = {"timestampFormat": f"{local}XXX", "timestampNTZFormat": local}
        texts[digits] = sf.to_json(sf.struct(*columns), options)
    is_whole = texts["SSSSSS"] == texts["SSS'000'"]
    return sf.when(is_whole, texts["SSS"]).otherwise(texts["SSSSSS"])
''',
    "text_of": '''\
def text_of(rows: DataFrame, column: str) -> Column:
    """Return a column as text for keys and topics; times in ISO 8601, UTC."""
    if isinstance(rows.select(column).schema[0].dataType, TimestampType):
        return sf.concat(sf.translate(sf.col(column).cast("string"), " ", "T"), sf.lit("Z"))
    return sf.col(column).cast("string")
''',
    "state_store_keys": '''\
def state_store_keys(pattern: str) -> DataFrame:
    """Read the keys of the state store that match `pattern`; each batch reads them again."""
    found = spark.read.format("aio-statestore").option("statestore.broker", BROKER)
    return found.option("keys", pattern).load()
''',
    "flattened": '''\
def flattened(
    rows: DataFrame, columns: list[str] | None, separator: str, *, prefix: bool
) -> DataFrame:
    """Replace struct columns (default: all) by a column for each of their fields, at all levels."""

    def leaves(path: list[str], kind: DataType) -> Iterator[list[str]]:
        if not isinstance(kind, StructType):
            yield path
            return
        for field in kind.fields:
            yield from leaves([*path, field.name], field.dataType)

    made = []
    for field in rows.schema.fields:
        chosen = not field.name.startswith("_") and (columns is None or field.name in columns)
        if not chosen or not isinstance(field.dataType, StructType):
            made.append(sf.col(f"`{field.name}`"))
            continue
        for path in leaves([field.name], field.dataType):
            name = separator.join(path if prefix else path[1:])
            made.append(sf.col(".".join(f"`{each}`" for each in path)).alias(name))
    return rows.select(*made)
''',
    "with_columns_of": '''\
def with_columns_of(
    rows: DataFrame,
    function: Callable[[pa.RecordBatch], Any],
    columns: str,
    given: list[str] | None,
) -> DataFrame:
    """Add the `columns` that `function` computes of Arrow batches; `given`: the columns that it gets."""
    made = spark.createDataFrame([], columns).schema
    kept = [field for field in rows.schema.fields if field.name not in made.names]
    schema = StructType([*kept, *made.fields])
    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    chosen = given or [column for column in rows.columns if not column.startswith("_")]

    names = rows.columns

    def computed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for numbered in batches:
            if not len(numbered):
                continue
            batch = numbered.rename_columns(names)
            found = function(batch.select(chosen))
            if not isinstance(found, dict):
                found = dict(zip(found.schema.names, found.columns, strict=True))
            values = {name: batch.column(name) for name in batch.schema.names}
            values |= {name: found[name] for name in made.names}
            columns = {name: values[name] for name in arrow_schema.names}
            yield from pa.Table.from_pydict(columns, schema=arrow_schema).to_batches()

    # mapInArrow takes a dot in a name for a field of a struct.
    return rows.toDF(*(f"c{n}" for n in range(len(names)))).mapInArrow(computed, schema)
''',
}
"""Functions of programs, which have those that they use."""
