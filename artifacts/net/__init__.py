"""HTTP client with rules for secrets, redirects, sizes and times. Independent of bundles, registries and models."""
