"""Tasks that are solved with tools: Python functions, or those of an MCP server."""
