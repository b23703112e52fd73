"""What a sparse cache knows of its layers, their forward passes and its rows, apart from transformers' interface."""
