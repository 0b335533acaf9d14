"""HTTP client with rules for secrets, redirects, sizes and timeouts. It knows nothing about bundles, registries or models."""
