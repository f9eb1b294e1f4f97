"""Makes ``format("mqtt")`` known to Spark, which imports every installed module named ``pyspark_*``.

Spark does so for every user of the environment at the first use of any data source, hence nothing heavy here.
"""

from __future__ import annotations

from penstock.spark.mqtt.source import MqttDataSource as DefaultSource

__all__ = ["DefaultSource"]
