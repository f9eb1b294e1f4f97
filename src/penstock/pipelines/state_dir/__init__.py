"""The state directory of a pipeline: layout and owner, durable files, checkpoints, replays. Imports no Spark."""
