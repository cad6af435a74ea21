"""What a program costs in time and memory, from its graph and a description of the hardware."""
