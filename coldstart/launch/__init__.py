"""Start a server for a request, by the fastest start mode that its bundle allows, until it has answered one token."""
