"""What ``tools/train_probe.py`` is made of."""
