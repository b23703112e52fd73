"""What it costs to keep blocks in host memory, part by part."""
