"""``format("tubemq")``: TubeMQ as a source and a sink of Spark."""
