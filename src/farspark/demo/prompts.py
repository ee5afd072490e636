"""What the demo asks when the user asks nothing. None of it was seen in the drafter's training."""

from __future__ import annotations

from typing import Final

PROMPTS: Final = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short recipe for tomato soup.",
    "What is the difference between a list and a tuple in Python?",
    "Give me five tips for sleeping better.",
)
