"""What is guessed ahead of the query: label channels."""
