"""The live host: one OpenAI-compatible endpoint, and the model servers that the core starts and stops."""
