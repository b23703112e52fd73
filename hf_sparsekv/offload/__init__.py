"""Memory for cached tokens: host memory, device pages, and the copies between them."""
