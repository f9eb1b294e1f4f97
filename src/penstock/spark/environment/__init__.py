"""Environment of Spark on this machine: Java, compiled Python packages, jars."""
