"""The Azure IoT Operations state store: a key-value store spoken to by request and response over MQTT 5."""
