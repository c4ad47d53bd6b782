"""Engine adapters: how each kind of engine is started, what its metrics say, what it is doing while it loads."""
