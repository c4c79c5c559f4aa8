"""Geometry: a picture, a question, an answer with a number or a choice."""
