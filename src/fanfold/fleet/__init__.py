"""Runs across machines: forwarders ship journal bytes from each node to a gateway, which stores them as run directories."""
