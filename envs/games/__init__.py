"""Small games without dependencies, for tests and quick demos."""
