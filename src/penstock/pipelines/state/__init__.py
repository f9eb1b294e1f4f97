"""The state directory of a pipeline: small durable files, Spark's checkpoints, the stretch that a replay reads."""
