"""Two hosts on one machine: network namespaces, a link between them that can be made bad, and what the engine makes of it."""
