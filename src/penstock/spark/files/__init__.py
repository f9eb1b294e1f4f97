"""Sources of pipelines for files and Delta tables, with the columns of ``tubemq``."""
