"""The live host: one OpenAI-compatible endpoint, and the servers behind it that start and leave as the core decides."""
