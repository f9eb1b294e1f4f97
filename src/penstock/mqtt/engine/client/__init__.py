"""The MQTT client without IO."""
