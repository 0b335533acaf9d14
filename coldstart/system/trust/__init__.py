"""Trust in code that runs here: trusted keys, cached verifications, and directories that no other user can change."""
