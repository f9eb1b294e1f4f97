"""Files and Delta tables as sources of pipelines, with the columns of ``tubemq``."""
