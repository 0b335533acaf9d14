"""Cold-start benchmark: time from the launch of a process to the first token over HTTP, for each start mode."""
