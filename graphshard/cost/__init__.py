"""Predict the time and memory of a training step from its program and the hardware."""
