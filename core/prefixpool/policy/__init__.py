"""Routing policies: pure functions from a query and the fleet's numbers to a choice with its reason."""
