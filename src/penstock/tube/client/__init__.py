"""What producer, consumer and readers are made of: ways to the brokers, batches, sessions at a master."""
