"""``format("tubemq")``: the TubeMQ source and sink."""
