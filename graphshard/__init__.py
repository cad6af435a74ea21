"""graphshard: a sharded-training compiler pass for PyTorch."""
