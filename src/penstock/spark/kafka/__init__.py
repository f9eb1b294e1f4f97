"""Batches of pipelines in topics of Kafka."""
