"""Charts and tables as static markup that needs no script, server or request: for reports and notebooks."""
