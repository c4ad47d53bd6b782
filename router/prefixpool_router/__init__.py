"""The router: sends each request to the replica that most likely holds its prefix."""
