"""penstock: the Azure IoT Operations state store, a TubeMQ log, and Spark pipelines between them."""

from penstock import compiled

__version__ = "0.1.0"

compiled.install()
