"""Tasks that are solved with tools: Python functions, or tools of an MCP server."""
