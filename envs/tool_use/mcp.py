"""Tools of an MCP server on stdio, with the package `mcp` (extra `mcp`), in a thread with a separate event loop."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

SECONDS = 60.0  # time limit of each call


class McpServer:
    """A running MCP server.

    Args:
        command: program of the server and its arguments.

    Raises:
        ImportError: the package `mcp` is missing; the message names the extra to install.
    """

    def __init__(self, command: Sequence[str]) -> None:
        try:
            from mcp import ClientSession, StdioServerParameters
            from mcp.client.stdio import stdio_client
        except ImportError as error:
            raise ImportError("Tools of an MCP server need the package mcp: install lightning-agentrl[mcp].") from error
        parameters = StdioServerParameters(command=command[0], args=list(command[1:]))
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._ready: threading.Event = threading.Event()
        self._error: BaseException | None = None
        self._session: Any = None

        async def live() -> None:
            """Open and close the session in one task, as the client requires."""
            try:
                async with AsyncExitStack() as stack:
                    streams = await stack.enter_async_context(stdio_client(parameters))
                    self._session = await stack.enter_async_context(ClientSession(*streams[:2]))
                    await self._session.initialize()
                    self._ready.set()
                    await self._over.wait()
            except BaseException as error:  # noqa: BLE001 - the constructor reports this error
                self._error = error
            finally:
                self._ready.set()

        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(live(),), daemon=True)
        self._thread.start()
        self._ready.wait(SECONDS)
        if self._error is not None or self._session is None:
            raise RuntimeError(f"The MCP server {command[0]} did not start: {self._error}.")

    def tools(self) -> list[dict[str, Any]]:
        """Return name, description and schema of each tool."""
        listed = self._run(self._session.list_tools())
        return [
            {"name": tool.name, "description": tool.description or "", "parameters": _schema(tool)}
            for tool in listed.tools
        ]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its texts."""
        result = self._run(self._session.call_tool(name, dict(arguments)))
        return "\n".join(part.text for part in result.content if getattr(part, "type", "") == "text")

    def close(self) -> None:
        """End the server."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(SECONDS)

    def _run(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(SECONDS)


def _schema(tool: Any) -> Any:
    return getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", {})
