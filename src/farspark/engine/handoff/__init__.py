"""Asynchronous rounds: the engine only enqueues, the device's stream waits for the reply, a proxy runs the round.

`handoff` is the engine's side, `stream` what a device does, `proxy` the one loop that serves rounds, in a `thread` of the
engine's process or in a `process` of its own (`child` is what runs there), `region` the memory that all of them share. No
torch here: the device's side is driver calls on addresses, the proxy's side makes none at all.
"""
