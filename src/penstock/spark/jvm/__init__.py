"""What penstock adds to Spark's JVM: one class, as source and compiled (`tools/jvm.py`)."""
