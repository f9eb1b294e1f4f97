"""Topics of Kafka as a source of pipelines (``penstock-kafka``), and the write of a batch to a topic once."""
