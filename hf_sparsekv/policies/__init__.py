"""Selection policies: what a decode step attends to."""
