"""Where every tensor lies, and its way into memory."""
