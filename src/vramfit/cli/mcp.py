"""`vramfit mcp`: the tools of vramfit for coding agents, over standard input and output."""

from vramfit.cli.options import verb


@verb("vramfit mcp")
def mcp() -> None:
    """Answer coding agents over MCP: estimate, max_batch, plan, explain and gpus, on standard input and output.

    Add it to a client as the command vramfit with the argument mcp. It runs no model and needs no GPU.
    Exit codes: 0 when the client leaves, 1 for an error, 2 for a wrong name or value.
    """
    from vramfit.integrations.mcp import serve

    serve()
