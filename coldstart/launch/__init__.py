"""Start a server in the fastest mode that its bundle and the machine allow, and wait until it has generated a token."""
