"""Environments whose agents read and write tokens; importing this package loads none of them."""
