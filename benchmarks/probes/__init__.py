"""Small programs that answer one question about the hardware."""
