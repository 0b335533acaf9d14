"""Communication between processes on one machine, and server addresses."""
