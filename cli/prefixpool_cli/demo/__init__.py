"""The demo: one committed workload through five policies on one pool, with a report of what each of them reused."""
