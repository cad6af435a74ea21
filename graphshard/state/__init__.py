"""Save and load a sharded module: state dicts, optimizer state, checkpoint files."""
