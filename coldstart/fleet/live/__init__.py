"""Live fleet on Ray: a controller, one actor per server, and a gateway that can serve without either."""
