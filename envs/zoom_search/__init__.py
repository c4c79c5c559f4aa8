"""ZoomSearch: find a small detail of a large picture with a zoom tool."""
