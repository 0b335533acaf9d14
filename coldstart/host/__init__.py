"""Scheduling decisions for many models on one machine: admission, starts and evictions. `host.live` executes them."""
