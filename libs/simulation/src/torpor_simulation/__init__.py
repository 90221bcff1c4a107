"""All of Torpor's services, unchanged, in one seeded virtual-time loop, with faults, checkers and mutants."""
