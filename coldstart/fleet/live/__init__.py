"""The live fleet on Ray: a controller, one actor per server, and a gateway that goes on without either."""
