"""The main job on one machine: a worker, a real vLLM, a real small model, and the proof that the text is the target's own."""
