"""Looking at plans and programs: text, tables, files. Reads, never writes, what it is shown."""
