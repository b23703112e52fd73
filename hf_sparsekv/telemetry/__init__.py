"""Telemetry of a cache: counters, times, chosen blocks."""
