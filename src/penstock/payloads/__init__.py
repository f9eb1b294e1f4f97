"""Payloads with a schema, Avro and Protobuf: columns of a schema, decoders and encoders; without Spark.

Of each format there are a schema (`avro_schema`), a decoder (`avro`), an encoder (`avro_encoding`), and a decoder of
messages whose writer has another schema (`avro_resolution`).
"""
