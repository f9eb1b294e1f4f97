"""The tube: a TubeMQ-compatible log. Master, broker, producer, consumer and a reader of exact ranges."""
