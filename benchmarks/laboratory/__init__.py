"""Effects of the recipe on models of 0.02 million parameters: a game with exact values, and cells that compare arms.

`make laboratory` runs the cells; `docs/results/laboratory.md` says what they are and what came out.
"""

import os

# Models are made here and read from folders. Before transformers is imported, which reads this once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
