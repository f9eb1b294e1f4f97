"""MQTT 5.0 on the wire: packets, properties and reason codes as data, incremental decoder, encoder, topics."""
