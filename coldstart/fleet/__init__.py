"""Scheduling decisions for many servers: which servers start a cold model together, and how they share their network links."""
