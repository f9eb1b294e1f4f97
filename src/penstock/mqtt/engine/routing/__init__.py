"""Which subscriptions and services receive a topic."""
