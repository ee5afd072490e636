"""The model families that the worker can serve: what their config.json means, and their maths in plain torch."""
