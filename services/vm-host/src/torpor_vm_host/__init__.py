"""Drives the microVMs of one machine through a driver, and records what it observes of them; it never decides."""
