"""``format("tubemq")``: the tube log as a source and a sink of Spark."""
