"""The native part of the operator probe, which runs inside torch: C++ sources, their build, and their Python bindings."""

__all__ = ["build", "library"]
