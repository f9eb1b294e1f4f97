"""Payloads with a schema, Avro and Protobuf: columns of a schema, and decoders of messages; without Spark."""
