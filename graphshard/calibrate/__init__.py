"""Measure this machine and its ranks, for a hardware file that simulations read."""
