"""Write rows to Parquet and Delta tables, MQTT, TubeMQ and the state store."""
