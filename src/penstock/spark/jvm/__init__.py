"""One Java class for Spark's JVM, as source and compiled (`tools/jvm.py`)."""
