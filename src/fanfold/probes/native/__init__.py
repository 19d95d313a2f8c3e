"""The part of the operator probe that runs inside torch: C++ sources, how they are built, and their Python face."""

__all__ = ["build", "library"]
