"""Where cached tokens live."""
