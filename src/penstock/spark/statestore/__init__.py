"""``format("aio-statestore")`` and look-ups: the keys of a state store in Spark."""
