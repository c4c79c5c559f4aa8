"""Text adventures of textworld-express."""
