"""What runs in the vLLM process: rank 0's model of the world, the client, the round, and the rooms that touch torch and vLLM."""
