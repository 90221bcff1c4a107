"""The embedded whole: nats-server and every service as supervised processes of one command, on one data directory."""
