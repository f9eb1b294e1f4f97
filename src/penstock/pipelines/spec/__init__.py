"""The pipeline file as data: models of its parts, loader, validation, plan of the queries. Imports no Spark.

Read `pipeline` first, the model of the file and the plan, then `sources`, `steps` and `sinks`; `loader` reads and
validates a file, and `columns` derives the columns after each step.
"""
