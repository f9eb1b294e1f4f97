"""Request handlers of the broker, one module per subject; `engine.broker_engine` dispatches requests to them."""
