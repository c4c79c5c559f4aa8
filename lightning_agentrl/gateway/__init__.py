"""Agent programs that call a model over HTTP and act as environments of the trainer. Nothing here imports torch."""
