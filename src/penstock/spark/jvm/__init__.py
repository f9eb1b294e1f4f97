"""A Java class for Spark's JVM, as source and compiled (see `tools/jvm.py`)."""
