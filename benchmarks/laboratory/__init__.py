"""Effects of the recipe on models of 0.02 million parameters: a game with exact values, and cells that compare arms.

`make laboratory` runs the cells; `docs/results/laboratory.md` says what they are and what came out.
"""
