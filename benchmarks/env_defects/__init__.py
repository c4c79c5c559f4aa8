"""Five sound text environments and forty small mistakes in them, to measure `agentrl check-env` with.

With this folder's parent on the import path, `env_defects:KeyDoor-v0` is a sound environment and
`env_defects:KeyDoor-unseeded-v0` the same with one mistake. `catalogue.DEFECTS` lists them, `run.py` runs the checker.
"""

from env_defects import hidden_number, key_door, pack_quiz, trading, two_steps

__all__ = ["hidden_number", "key_door", "pack_quiz", "trading", "two_steps"]
