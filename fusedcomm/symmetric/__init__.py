"""Memory that every rank of a group can address."""
