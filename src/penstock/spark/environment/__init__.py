"""What Spark needs on this machine: Java, compiled Python packages, jars."""
