"""HTTP client with rules for secrets, redirects, sizes and time limits.

It knows nothing about bundles, registries or models.
"""
