"""Is a bundle what it says, does it fit, does it start, does it answer as an ordinary start does."""
