"""Values in and out of a sharded module: state dicts, optimizer state, files."""
