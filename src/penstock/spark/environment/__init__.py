"""Spark's environment on this machine: Java, compiled Python packages, jars."""
