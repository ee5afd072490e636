"""The in-engine checks against a live server, one by one, each with its pass criterion."""
