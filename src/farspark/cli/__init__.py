"""The `farspark` command: one file per command, which parses, prints and sets the exit code, and nothing else."""
