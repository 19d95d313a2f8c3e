"""Past one machine: forwarders ship journal bytes from each node to a gateway, which keeps them as the same run directories."""
