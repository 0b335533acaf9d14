"""Decisions about many models on one machine: admission, start, eviction. `host.live` runs them."""
