"""The agent inside a guest: first process of the machine, and the host's hand in it; standard library only."""
