"""The tools over MCP, the Model Context Protocol, by its official library: on stdin and stdout, or as an ASGI app."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..errors import FanfoldError, needed
from ..store.query import Store
from .shorten import fitted
from .table import TOOLS, Picture, asked, is_open

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server
    from starlette.types import Receive, Scope, Send

POLL_SECONDS = 0.5
INSTRUCTIONS = """\
fanfold records training runs: config, metrics over steps, console, code and machine. Begin with `list` or `find`, then `show`,
`points` and `compare`. `diagnose` says what went wrong, with evidence; `wait` blocks until a run ends or a metric is reached;
`tell`, if there is one, steers a running job.
Times are seconds since 1970. NaN and infinities are the texts "NaN", "Infinity" and "-Infinity". Long answers are cut, and
`left_out` says where: ask for less at a time."""
Ask = Callable[[Any, Callable[[], Any]], Awaitable[Any]]  # runs a question off the event loop; the request comes first
Reach = Callable[[Any], tuple[Store, bool]]  # the store that a request may read, and whether it may write


def server(reach: Reach, ask: Ask) -> Server[Any]:
    """Return an MCP server whose requests read the store that `reach` gives them."""
    with needed("mcp", "mcp", "MCP"):
        import mcp_types as types
        from mcp.server.lowlevel import Server

    async def tools(ctx: Any, _params: Any) -> types.ListToolsResult:
        write = reach(ctx.request)[1]
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=tool.name, description=tool.meaning, input_schema=tool.schema,
                    annotations=types.ToolAnnotations(read_only_hint=not tool.writes, destructive_hint=tool.destructive),
                )
                for tool in TOOLS.values() if write or not tool.writes
            ]
        )  # fmt: skip

    async def call(ctx: Any, params: Any) -> types.CallToolResult:
        try:
            store, write = reach(ctx.request)
            found = await _answered(ctx.request, ask, store, params.name, params.arguments, write)
        except (FanfoldError, OSError) as error:
            kind = {"error": type(error).__name__}
            return types.CallToolResult(content=[types.TextContent(text=str(error))], structured_content=kind, is_error=True)
        pictures: list[Picture] = []
        result, left_out = fitted(_without_pictures(found, pictures))
        answer = {"result": result, "left_out": left_out}
        content: list[Any] = [types.TextContent(text=_json(answer))]
        content += [types.ImageContent(data=one.data, mime_type=one.kind) for one in pictures]
        return types.CallToolResult(content=content, structured_content=answer)

    return Server("fanfold", version=__version__, instructions=INSTRUCTIONS, on_list_tools=tools, on_call_tool=call)


async def _answered(request: Any, ask: Ask, store: Store, name: str, arguments: Any, write: bool) -> Any:
    """Answer a call; one that waits is asked again until it is over, without taking a thread meanwhile."""
    import anyio

    tool, question = asked(store, name, arguments, write=write)
    until = time.monotonic() + (question.args[1].timeout if tool.waits else 0.0)
    while True:
        found = await ask(request, question)
        left = until - time.monotonic()
        if not tool.waits or not is_open(found) or left <= 0:
            return found
        await anyio.sleep(min(POLL_SECONDS, left))


def _without_pictures(value: Any, pictures: list[Picture]) -> Any:
    """Move the pictures of an answer into a list; each leaves its place in it."""
    if isinstance(value, Picture):
        pictures.append(value)
        return f"picture {len(pictures)} of this answer"
    if isinstance(value, dict):
        return {name: _without_pictures(one, pictures) for name, one in value.items()}
    return [_without_pictures(one, pictures) for one in value] if isinstance(value, list) else value


def _json(answer: Any) -> str:
    import msgspec

    return msgspec.json.encode(answer).decode()


def over_stdio(store: Store, *, write: bool) -> None:
    """Serve one client on stdin and stdout until it leaves."""
    import anyio

    async def ask(_request: Any, question: Callable[[], Any]) -> Any:
        return await anyio.to_thread.run_sync(question)

    made = server(lambda _: (store, write), ask)

    async def serve() -> None:
        from mcp.server.stdio import stdio_server

        async with stdio_server() as (reading, writing):
            await made.run(reading, writing, made.create_initialization_options())

    anyio.run(serve)


async def over_http(made: Server[Any], scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one HTTP request. Nothing is kept between requests, so any process behind a load balancer can answer."""
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

    manager = StreamableHTTPSessionManager(made, stateless=True, json_response=True)
    async with manager.run():
        await manager.handle_request(scope, receive, send)
