"""HTTP client with rules for secrets, redirects, sizes and time limits. Knows nothing of bundles, registries and models."""
