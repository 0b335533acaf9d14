"""What decides which bundle serves: vLLM's arguments, the identity of a model, the key, the look-up."""
