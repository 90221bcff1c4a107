"""The log-relay owns the stream EVENTS and the signed heads: it copies the log to the one, and signs the other."""
