"""What router, agent, operator and CLI share: pure decisions and the words they exchange. No I/O libraries here."""

__version__ = "0.1.0"
