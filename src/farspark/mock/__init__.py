"""A worker without a model that fails on demand."""
