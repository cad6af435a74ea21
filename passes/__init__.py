"""The passes, one per file. Imported as `graphshard.passes`."""
