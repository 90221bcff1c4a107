"""A driver whose machines are small state machines: for simulations, tests and machines that can run no microVM."""
