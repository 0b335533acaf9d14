"""Cold start as a user feels it: from process launch to the first token over HTTP, mode against mode."""
