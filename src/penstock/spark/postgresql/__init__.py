"""Write rows to PostgreSQL: connections, types of columns, and the protocol that writes a batch once (``writes``)."""
