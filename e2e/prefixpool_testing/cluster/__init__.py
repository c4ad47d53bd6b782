"""A real Kubernetes on this machine, without a registry: the API server alone, or a whole node in a network of its own."""
