"""From a request to a server that has answered one token, by the fastest way that its bundle allows."""
