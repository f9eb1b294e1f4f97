"""Connections to Kafka, for rules of a node and for pipelines."""
