"""What test rooms share: builders of examples, and real servers."""
