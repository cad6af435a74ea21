"""Choosing what backward computes again instead of saving it."""
