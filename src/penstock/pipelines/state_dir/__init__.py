"""The state directory of a pipeline: layout and owner, durable files, checkpoints, replays. Imports no Spark.

Read `layout` first; the other modules each have one kind of its files.
"""
