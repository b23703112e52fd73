"""Selection policies: which cached tokens a decode step attends to."""
