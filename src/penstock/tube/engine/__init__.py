"""Rules of master, broker, producer and consumer: requests and instants in, answers and orders out. No IO."""
