"""BabyAI in words: Minigrid levels with text observations (`text`), levels (`levels`) and the environment (`env`)."""
