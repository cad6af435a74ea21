"""The sharded module: the original module with its parameters sharded and its program run."""
