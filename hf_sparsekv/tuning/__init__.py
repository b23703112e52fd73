"""What will fit, and what is quickest on a device."""
