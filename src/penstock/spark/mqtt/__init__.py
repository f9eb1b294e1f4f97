"""``format("mqtt")``: the MQTT source and sink."""
