"""Placing communication by its cost: what a step may hold, how good a program is."""
