"""The subcommands: each parses, calls the engine and renders; no logic lives here."""
