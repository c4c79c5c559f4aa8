"""Text adventures that TextWorld generates, and the text adventures of textworld-express."""
