"""Structured pruning: whole channels, heads and units are removed, so that every runtime gets faster."""
