"""Keys and queries that behave like recorded ones."""
