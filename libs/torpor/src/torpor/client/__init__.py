"""The SDK's inside: one NATS connection of one tenant, and everything a caller does over it."""
