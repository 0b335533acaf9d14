"""What may be said to whom over a network, and how long an answer may take. Knows no bundle, registry or model."""
