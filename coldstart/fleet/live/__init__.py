"""Live fleet on Ray: one process that is gateway and controller, and one actor per server."""
