"""Machines: their speeds, links and memory, as files that plans and simulations read."""
