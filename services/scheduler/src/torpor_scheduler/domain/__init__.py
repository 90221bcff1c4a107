"""Pure decisions about sessions and hosts: no clock, no randomness, no input or output."""
