"""Tuning by measurement: the batch size that fits into memory, the one that is fast enough, and the settings for it."""
