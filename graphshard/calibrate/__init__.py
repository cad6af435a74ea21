"""Measuring the present machine and group, for a hardware file that simulations read."""
