"""Decisions about many servers: which of them start a cold model together, and how they share their links."""
