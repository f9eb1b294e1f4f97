"""Sessions: their subscriptions, queues, deliveries and persistent state."""
