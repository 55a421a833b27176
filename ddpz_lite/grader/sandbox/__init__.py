"""The place that a rank is shut into: namespaces, limits, and what of the package it may see."""
