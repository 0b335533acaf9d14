"""Whose code may run here: trusted keys, remembered verifications, and directories that no other user can change."""
