"""Geometry: questions about a picture, answered with a number or a choice."""
