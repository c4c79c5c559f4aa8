"""Agent programs that call a model over HTTP, and are environments to the trainer. Nothing here imports torch."""
