"""Kubernetes manifests of a fleet: generates documents, and does not apply them."""
