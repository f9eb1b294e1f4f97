"""penstock: the Azure IoT Operations state store, a TubeMQ log, and Spark pipelines between them."""

__version__ = "0.1.0"
