"""What a cache did: counters, times, chosen blocks."""
