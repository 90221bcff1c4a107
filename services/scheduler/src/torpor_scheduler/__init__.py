"""The scheduler owns sessions and hosts: it decides what is to happen to them, and never touches a machine itself."""
