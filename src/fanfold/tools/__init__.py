"""What programs and agents ask about runs: the same answers on the command line and over MCP."""
