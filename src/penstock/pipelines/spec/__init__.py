"""The pipeline file as data: models of its parts, loader, validation, plan of the queries. Imports no Spark."""
