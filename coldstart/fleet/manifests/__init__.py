"""Kubernetes manifests of a fleet. Nothing here applies them."""
