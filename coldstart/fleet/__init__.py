"""Scheduling decisions for many servers: which of them start a cold model together, and how they share their network links."""
