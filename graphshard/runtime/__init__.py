"""Running a finished program on ranks: cut, lower, collectives, sharded parameters."""
