"""What a sparse cache keeps of its layers, forward passes and rows, apart from transformers' interface."""
