"""The operator: observe → `plan()` (pure) → apply, for every trigger the same."""
