"""ZoomSearch: find something small in a large picture with a zoom tool."""
