"""The worker side: supervisor, engine adapters, gate, agent. Kept empty: the gate is imported inside vLLM."""
