"""The sandbox: isolation, the visible part of the package, limits, and how it ends."""
