"""Checks of an environment before anybody trains on it: what is wrong, how to see it again, and how to mend it."""
