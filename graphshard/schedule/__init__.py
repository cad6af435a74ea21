"""Place the communication of a program by estimated times, within a byte budget."""
