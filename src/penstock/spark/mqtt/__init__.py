"""``format("mqtt")``: messages of an MQTT broker in Spark."""
