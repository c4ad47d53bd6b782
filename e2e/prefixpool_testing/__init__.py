"""Test kit: sim pools on loopback, fault injection. Never part of the wheel."""
