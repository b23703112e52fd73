"""Attention over chosen tokens, and the rotary embedding that is fused with it."""
