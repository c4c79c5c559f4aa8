"""One environment, its episodes, and the turn loop that plays them.

Nothing is imported here: the processes of environments import modules of this room, and must not load torch.
"""
