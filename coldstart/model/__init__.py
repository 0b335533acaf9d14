"""From the name that a user types to a model's files."""
