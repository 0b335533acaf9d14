"""HTTP client with rules for secrets, redirects, sizes and timeouts, which is independent of bundles, registries and models."""
