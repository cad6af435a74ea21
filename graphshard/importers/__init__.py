"""Policies read from other systems' configuration files."""
