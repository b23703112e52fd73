"""Parts of a model's layers that decode steps fuse: norms, linear layers, experts."""
